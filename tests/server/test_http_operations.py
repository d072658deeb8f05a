"""Keys, limits, cancellation, metrics, failure and shutdown."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from qdeploy.errors import UsageError
from qdeploy.server.listen import bind
from server.harness import HI, Served, serving, sse

ROUTES = [
    ("GET", "/ready"),
    ("GET", "/metrics"),
    ("GET", "/version"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/tiny"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/nope"),
    ("GET", "/docs"),
    ("GET", "/openapi.json"),
    ("GET", "/health/"),
    ("GET", "//health"),
]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(max_num_seqs=4) as running:
        yield running


def wait_for(condition: Callable[[], bool], timeout: float = 5.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def samples(served: Served) -> dict[str, float]:
    """Sample name and labels → value."""
    found = {}
    for family in text_string_to_metric_families(served.get("/metrics").text):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def test_h02_every_route_but_health_asks_for_the_key() -> None:
    with serving(api_key="s3cret", cors_origin=("https://ui.example",)) as served:
        wrong = [{}, {"Authorization": "Bearer s3cre"}, {"Authorization": "s3cret"}]
        wrong += [{"Authorization": "Bearer"}, {"Authorization": "Basic s3cret"}]
        for method, path in ROUTES:
            for headers in wrong:
                response = served.client.request(method, served.url + path, headers=headers)
                assert response.status_code == 401, (path, headers)
                assert response.json()["error"]["code"] == "invalid_api_key"
        assert served.get("/health").status_code == 200
        key = {"Authorization": "Bearer s3cret"}
        assert served.get("/v1/models", headers=key).status_code == 200
        assert served.openai.models.list().data[0].id == "tiny"
        preflight = served.client.options(
            "/v1/models",
            headers={"Origin": "https://ui.example", "Access-Control-Request-Method": "GET"},
        )
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://ui.example"


def test_h02_preflight_is_not_401_without_cors() -> None:
    with serving(api_key="s3cret") as served:
        response = served.client.options("/v1/chat/completions")
        assert response.status_code == 405
        assert "access-control-allow-origin" not in response.headers


def test_h10_body_limit_declared_and_chunked() -> None:
    with serving(max_body_size=100_000) as served:
        start = time.monotonic()
        declared = served.post("/v1/completions", content=b"x" * 200_000)
        assert declared.status_code == 413
        assert declared.json()["error"]["code"] == "body_too_large"
        chunked = served.post("/v1/completions", content=iter([b"x" * 50_000] * 4))
        assert chunked.status_code == 413
        assert time.monotonic() - start < 2
        legal = served.post("/tokenize", {"prompt": "a" * 90_000})
        assert legal.json()["count"] == 90_000
        assert served.complete(max_tokens=1).status_code == 200


def test_h10_a_declared_64_mb_body_is_refused_before_it_is_sent(served: Served) -> None:
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 67108864\r\n\r\n{"
        )
        assert client.recv(4096).startswith(b"HTTP/1.1 413")


def test_h12_metric_types_and_values(served: Served) -> None:
    before = samples(served)
    assert served.chat(max_tokens=5).status_code == 200
    served.wait_idle()
    text = served.get("/metrics").text
    families = {f.name: f.type for f in text_string_to_metric_families(text)}
    for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert families[f"qdeploy:{gauge}"] == "gauge"
    for counter in ("prompt_tokens", "generation_tokens", "num_preemptions", "request_success"):
        assert families[f"qdeploy:{counter}"] == "counter"
    for histogram in ("time_to_first_token_seconds", "inter_token_latency_seconds"):
        assert families[f"qdeploy:{histogram}"] == "histogram"
    after = samples(served)

    def grown(name: str) -> float:
        return after[f"qdeploy:{name}"] - before[f"qdeploy:{name}"]

    usage = served.chat(max_tokens=5).json()["usage"]
    assert grown("generation_tokens_total") == 5
    assert grown("prompt_tokens_total") == usage["prompt_tokens"]
    assert grown("request_success_total{finished_reason=length}") == 1
    assert grown("time_to_first_token_seconds_count") == 1
    assert grown("inter_token_latency_seconds_count") == 4
    assert grown("e2e_request_latency_seconds_count") == 1
    assert grown("request_generation_tokens_sum") == 5
    assert grown("iteration_num_seqs_count") == grown("iteration_tokens_total_count") >= 5
    assert after["qdeploy:kv_blocks{pool=open,state=live}"] == 0
    assert after["qdeploy:kv_blocks{pool=open,state=free}"] > 0
    assert after["qdeploy:engine_last_step_age_seconds"] == 0


def test_prefix_hits_and_cached_blocks_are_counted(served: Served) -> None:
    prompt = "b" * 40
    for _ in range(2):
        before = samples(served)
        assert served.complete(prompt=prompt, max_tokens=1).status_code == 200
        served.wait_idle()
    after = samples(served)
    grown = {
        name: after[f"qdeploy:prefix_cache_{name}_total"]
        - before[f"qdeploy:prefix_cache_{name}_total"]
        for name in ("queries", "hits")
    }
    assert grown["queries"] >= 40
    assert grown["hits"] == (grown["queries"] - 1) // 8 * 8
    cached = [
        after[f"qdeploy:kv_blocks{{pool={pool},state=cached}}"] for pool in ("open", "sealed")
    ]
    assert min(cached) > 0


def test_preemptions_are_counted_by_kind() -> None:
    for mode in ("swap", "recompute"):
        with serving(num_kv_blocks=36, preemption=mode, enable_prefix_caching=False) as small:
            with ThreadPoolExecutor(3) as pool:
                body = {"max_tokens": 150, "ignore_eos": True}
                replies = list(pool.map(lambda _, body=body: small.complete(**body), range(3)))
            assert {reply.status_code for reply in replies} == {200}
            small.wait_idle()
            found = samples(small)
            assert found["qdeploy:num_preemptions_total"] > 0
            expected = found["qdeploy:num_preemptions_total"] if mode == "swap" else 0
            assert found["qdeploy:num_swaps_total"] == expected
            assert found["qdeploy:swap_space_used_bytes"] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_h14_closing_the_connection_cancels(served: Served, stream: bool) -> None:
    served.executor.step_s = 0.02
    aborted = "qdeploy:request_success_total{finished_reason=abort}"
    before = samples(served)[aborted]
    body = {"messages": HI, "ignore_eos": True, "stream": stream, "n": 2}
    try:
        with httpx.Client(base_url=served.url) as client:
            if stream:
                with client.stream("POST", "/v1/chat/completions", json=body) as response:
                    next(response.iter_lines())
            else:
                with pytest.raises(httpx.ReadTimeout):
                    client.post("/v1/chat/completions", json=body, timeout=0.3)
        served.wait_idle(3)
    finally:
        served.executor.step_s = 0.0
    assert samples(served)[aborted] == before + 2  # H12: counted
    assert served.complete(max_tokens=2).json()["choices"][0]["text"] == "bc"


def test_neighbours_of_a_cancelled_request_keep_their_tokens(served: Served) -> None:
    served.executor.step_s = 0.01
    try:
        with ThreadPoolExecutor() as pool:
            kept = pool.submit(served.complete, prompt="a", max_tokens=20)
            with served.client.stream(
                "POST", "/v1/completions", json={"prompt": "a", "max_tokens": 99, "stream": True}
            ) as response:
                next(response.iter_lines())
            assert kept.result().json()["choices"][0]["text"] == "bcdefghijklménopqrs"
    finally:
        served.executor.step_s = 0.0
    served.wait_idle()


def test_full_queue_is_503_with_retry_after() -> None:
    with serving(max_num_seqs=1, max_queued_requests=1) as served:
        served.executor.step_s = 0.05
        with ThreadPoolExecutor() as pool:
            jobs = [pool.submit(served.complete, max_tokens=10) for _ in range(4)]
            answers = [job.result() for job in jobs]
        served.executor.step_s = 0.0
        assert sorted(a.status_code for a in answers) == [200, 200, 503, 503]
        refused = next(a for a in answers if a.status_code == 503)
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "queue_full"
        assert served.complete(max_tokens=1).status_code == 200


def test_request_timeout() -> None:
    with serving(request_timeout=0.2) as served:
        served.executor.step_s = 0.05
        whole = served.chat(ignore_eos=True)
        assert whole.status_code == 504
        assert whole.json()["error"]["code"] == "request_timeout"
        events = sse(served.chat(ignore_eos=True, stream=True).text)
        assert json.loads(events[-2])["error"]["code"] == "request_timeout"
        assert events[-1] == "[DONE]"
        served.wait_idle()
        assert served.complete(max_tokens=1).status_code == 200


def test_r10_dead_engine_fails_open_requests_and_health() -> None:
    with serving() as served:
        served.executor.step_s = 0.02
        assert served.get("/health").status_code == 200

        def die() -> list[object]:
            raise RuntimeError("injected bug")

        with ThreadPoolExecutor() as pool:
            whole = pool.submit(served.chat, ignore_eos=True)
            streamed = pool.submit(served.chat, ignore_eos=True, stream=True)
            wait_for(lambda: served.engine.stats.num_requests_running == 2)
            served.core.step = die  # type: ignore[method-assign,assignment]
            assert whole.result().status_code == 503
            events = sse(streamed.result().text)
        assert "injected bug" in json.loads(events[-2])["error"]["message"]
        assert events[-1] == "[DONE]"
        health = served.get("/health")
        assert health.status_code == 503
        assert health.json()["status"] == "dead"
        assert served.get("/ready").status_code == 503
        assert served.complete().status_code == 503
        assert served.get("/metrics").status_code == 200


def test_h09_a_stuck_step_is_503_and_busy_is_200() -> None:
    with serving(stall_timeout=0.3) as served:
        served.executor.step_s = 0.02
        with ThreadPoolExecutor() as pool:
            busy = pool.submit(served.chat, ignore_eos=True, max_tokens=40)
            while not busy.done():
                assert served.get("/health").status_code == 200
                time.sleep(0.02)
            served.executor.step_s = 1.0
            stuck = pool.submit(served.complete, max_tokens=1)
            time.sleep(0.6)
            health = served.get("/health")
            served.executor.step_s = 0.0
            assert health.status_code == 503
            assert health.json()["last_step_age_s"] > 0.3
            assert stuck.result().status_code == 200
        assert served.get("/health").status_code == 200


def test_shutdown_lets_open_requests_finish() -> None:
    with serving(shutdown_timeout=10) as served, ThreadPoolExecutor() as pool:
        served.executor.step_s = 0.02
        job = pool.submit(served.chat, ignore_eos=True, max_tokens=40)
        wait_for(lambda: served.engine.stats.num_requests_running == 1)
        served.server.should_exit = True
        wait_for(lambda: served.engine.draining)
        assert job.result().json()["usage"]["completion_tokens"] == 40
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{served.url}/health")


def test_shutdown_timeout_ends_the_rest() -> None:
    with serving(shutdown_timeout=0.2) as served, ThreadPoolExecutor() as pool:
        served.executor.step_s = 0.05
        whole = pool.submit(served.chat, ignore_eos=True)
        streamed = pool.submit(served.chat, ignore_eos=True, stream=True)
        wait_for(lambda: served.engine.stats.num_requests_running == 2)
        start = time.monotonic()
        served.server.should_exit = True
        assert whole.result().status_code == 503
        assert json.loads(sse(streamed.result().text)[-2])["error"]["code"] == "shutting_down"
        assert time.monotonic() - start < 3


def test_h13_a_taken_port_is_one_line_that_names_it() -> None:
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(UsageError, match=f"port {port}"):
            bind("127.0.0.1", port)
    with pytest.raises(UsageError, match="host"):
        bind("no.such.host.invalid", 0)


def test_many_concurrent_clients(served: Served) -> None:
    """32 clients on 4 slots: everybody gets his own tokens, and nothing is left behind."""
    results: dict[int, str] = {}

    def ask(i: int) -> None:
        start = chr(ord("a") + i % 8)
        reply = served.complete(prompt=start, max_tokens=3).json()
        results[i] = reply["choices"][0]["text"]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {i: "abcdefghijk"[i % 8 + 1 :][:3] for i in range(32)}
    served.wait_idle()
    served.core.scheduler.check_integrity()
