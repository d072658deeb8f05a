"""Requests that are wrong: 400 with OpenAI's error body, and the server stays alive."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from server.harness import HI, Served, serving


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(max_num_seqs=8) as running:
        yield running


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"].startswith("application/json")
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "\n" not in error["message"]
    return dict(error)


def assert_alive(served: Served) -> None:
    assert served.get("/health").status_code == 200
    assert served.complete(max_tokens=2).json()["choices"][0]["text"] == "bc"


@pytest.mark.parametrize(
    "body",
    [
        b"{:",
        b"",
        b"[]",
        b'"text"',
        b"null",
        b'{"prompt":"\xff\xfe"}',
        '{"prompt":"你好"}'.encode("gbk"),
        b'{"prompt":"a","temperature":NaN}',
        b'{"prompt":"a","temperature":1e999}',
        b'{"prompt":' + b"[" * 100_000,
        b'{"prompt":"\\ud800"}',
        b'{"\\ud800":1,"prompt":"a"}',
        b'{"prompt":"a","model":"\\ud800"}',
        b'{"prompt":"a","stop":"\\ud800"}',
        b'{"prompt":"a","seed":' + b"9" * 5000 + b"}",
    ],
)
@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_h01_broken_bodies(served: Served, route: str, body: bytes) -> None:
    response = served.post(route, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code in (400, 404), response.text
    error_of(response, response.status_code)
    assert_alive(served)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": 7}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**9]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": True}, "n"),
        ({"stream": 1}, "stream"),
        ({"stop": 5}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"²": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 500}}, "logit_bias"),
        ({"logprobs": 99}, "logprobs"),
        ({"seed": 2**70}, "seed"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"nonsense": 1}}, "stream_options"),
        ({"stream": True, "stream_options": 1}, "stream_options"),
    ],
)
def test_h01_wrong_fields_are_named(served: Served, changes: dict[str, Any], param: str) -> None:
    assert error_of(served.complete(**changes))["param"] == param
    assert_alive(served)


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["a", ""], [[1], []]])
def test_r01_empty_prompts(served: Served, prompt: Any) -> None:
    assert error_of(served.complete(prompt=prompt))["param"] == "prompt"
    assert_alive(served)


def test_r01_no_messages(served: Served) -> None:
    assert error_of(served.chat(messages=[]))["param"] == "messages"
    assert_alive(served)


def test_r02_max_tokens_zero(served: Served) -> None:
    assert error_of(served.complete(max_tokens=0))["param"] == "max_tokens"
    reply = served.complete(max_tokens=0, echo=True).json()
    assert reply["choices"][0]["text"] == "xa"
    assert (reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]) == (2, 0)
    assert error_of(served.chat(max_tokens=0))["param"] == "max_tokens"
    assert_alive(served)


@pytest.mark.parametrize("stop", ["", [""], ["x", ""]])
def test_r21_empty_stop(served: Served, stop: Any) -> None:
    assert error_of(served.complete(stop=stop))["param"] == "stop"
    assert error_of(served.chat(stop=stop))["param"] == "stop"


@pytest.mark.parametrize("stop", [None, []])
def test_r21_no_stop(served: Served, stop: Any) -> None:
    assert served.complete(stop=stop, max_tokens=3).json()["choices"][0]["text"] == "bcd"


def test_h03_unknown_model(served: Served) -> None:
    error = error_of(served.complete(model="no-such"), 404)
    assert error["code"] == "model_not_found"
    assert "'tiny'" in error["message"]
    assert error_of(served.get("/v1/models/no/such"), 404)["code"] == "model_not_found"
    assert served.complete(model="tiny").status_code == 200
    assert served.complete(model=None).json()["model"] == "tiny"
    assert served.get("/v1/models/tiny").json()["id"] == "tiny"
    assert [m["id"] for m in served.get("/v1/models").json()["data"]] == ["tiny"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"n": 0}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"temperature": 9e99, "top_k": -5}, "top_k"),
        ({"max_tokens": 10_000}, "max_tokens"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
    ],
)
def test_h06_bad_input_is_400_before_the_stream(
    served: Served, body: dict[str, Any], param: str
) -> None:
    assert error_of(served.chat(stream=True, **body))["param"] == param


def test_h07_text_parts(served: Served) -> None:
    parts = [{"type": "text", "text": "Hi"}, {"type": "text", "text": " there"}]
    listed = served.chat(messages=[{"role": "user", "content": parts}], max_tokens=1).json()
    plain = served.chat(messages=[{"role": "user", "content": "Hi there"}], max_tokens=1).json()
    assert listed["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    error = error_of(served.chat(messages=[{"role": "user", "content": [*parts, image]}]))
    assert "image_url" in error["message"]
    assert error["param"] == "messages"


@pytest.mark.parametrize(
    "content", [None, 5, [{"type": "text"}], [{"type": "text", "text": 3}], [{}], ["a"], {"a": 1}]
)
def test_h07_bad_content(served: Served, content: Any) -> None:
    error = error_of(served.chat(messages=[{"role": "user", "content": content}]))
    assert error["param"] == "messages"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"n": 1_000_000}, "n"),
        ({"n": 9}, "n"),
        ({"max_tokens": 10**9}, "max_tokens"),
        ({"prompt": ["a"] * 100_000}, "prompt"),
        ({"prompt": ["a"] * 100, "n": 8}, "n"),
        ({"min_tokens": 10**9}, "min_tokens"),
    ],
)
def test_h11_bounded_work(served: Served, body: dict[str, Any], param: str) -> None:
    assert error_of(served.complete(**body))["param"] == param


def test_too_long_prompt_gives_the_numbers(served: Served) -> None:
    error = error_of(served.complete(prompt="a" * 300))
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "prompt"
    assert "300" in error["message"]
    assert "256" in error["message"]
    assert error_of(served.chat(messages=[{"role": "user", "content": "a" * 300}]))["param"] == (
        "messages"
    )


def test_r26_never_an_empty_200() -> None:
    """33 blocks hold one sequence of 256 tokens: more samples wait or are refused."""
    with serving(max_num_seqs=4, num_kv_blocks=40) as small:
        error_of(small.complete(prompt="a" * 256, max_tokens=1))
        one = small.complete(prompt="a" * 250, max_tokens=3).json()
        assert one["choices"][0]["text"] == "bcd"
        many = small.complete(prompt="a" * 200, max_tokens=3, n=4)
        if many.status_code == 200:
            assert [c["text"] for c in many.json()["choices"]] == ["bcd"] * 4
        else:
            assert error_of(many)["message"]


@pytest.mark.parametrize(
    "field",
    [
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"response_format": {"type": "json_object"}},
        {"reasoning_effort": "high"},
        {"echo": True},
        {"made_up": 1},
        {"store": True},
        {"best_of": 2},
        {"modalities": ["audio"]},
    ],
)
def test_fields_that_would_be_ignored_are_refused(served: Served, field: dict[str, Any]) -> None:
    assert error_of(served.chat(**field))["param"] == next(iter(field))


def test_fields_at_values_that_ask_for_nothing_are_accepted(served: Served) -> None:
    neutral = {
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "user": "someone",
        "metadata": {"a": "b"},
        "store": False,
        "logit_bias": {},
        "service_tier": "auto",
        "functions": None,
    }
    assert served.chat(max_tokens=1, **neutral).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nope", 404), ("POST", "/v1/nope", 404), ("GET", "/v1/completions", 405)],
)
def test_unknown_routes(served: Served, method: str, path: str, status: int) -> None:
    error_of(httpx.request(method, served.url + path), status)


def test_tokenize_and_back(served: Served) -> None:
    reply = served.post("/tokenize", {"prompt": "abcé"}).json()
    assert reply["count"] == len(reply["tokens"]) == 5
    assert reply["max_model_len"] == 256
    assert served.post("/detokenize", {"tokens": reply["tokens"]}).json() == {"prompt": "abcé"}
    chat = served.post("/tokenize", {"messages": HI}).json()
    assert chat["count"] == served.chat(max_tokens=1).json()["usage"]["prompt_tokens"]
    assert error_of(served.post("/detokenize", {"tokens": [10**6]}))["param"] == "tokens"
    assert error_of(served.post("/detokenize", {"tokens": "x"}))["param"] == "tokens"
    assert error_of(served.post("/tokenize", {}))["param"] == "prompt"


def test_every_error_is_valid_json_text(served: Served) -> None:
    response = served.post("/v1/completions", content=b'{"prompt": "a", "top_k": "\\udfff\\n"}')
    assert json.loads(response.content)["error"]["param"] == "top_k"
