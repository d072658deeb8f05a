"""What comes back: answers, chunks and their framing, with the real openai client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from transformers import AutoTokenizer

from qdeploy.runtime.tokenizer import Tokenizer
from runtime.tiny_tokenizer import CHATML, save_tokenizer
from server.harness import ALPHABET, HI, Served, alphabet_tokenizer, serving, sse


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(max_num_seqs=8) as running:
        yield running


def chunks_of(served: Served, path: str, **body: Any) -> list[dict[str, Any]]:
    response = served.post(path, {"stream": True, **body})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = sse(response.text)
    assert events[-1] == "[DONE]"
    assert events.count("[DONE]") == 1
    return [json.loads(event) for event in events[:-1]]


def chat_chunks(served: Served, **body: Any) -> list[dict[str, Any]]:
    return chunks_of(served, "/v1/chat/completions", messages=HI, **body)


def test_h04_chat_chunks(served: Served) -> None:
    chunks = chat_chunks(served, max_tokens=5)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert all("finish_reason" in choice for choice in choices)
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert all("role" not in choice["delta"] for choice in choices[1:])
    assert choices[-1]["delta"] == {}
    assert choices[-1]["finish_reason"] == "length"
    assert all(choice["finish_reason"] is None for choice in choices[:-1])
    assert "".join(c["delta"].get("content", "") for c in choices) == "abcde"
    assert {(c["id"], c["model"], c["created"], c["object"]) for c in chunks} == {
        (chunks[0]["id"], "tiny", chunks[0]["created"], "chat.completion.chunk")
    }
    assert all("usage" not in chunk for chunk in chunks)


def test_h04_completion_chunks(served: Served) -> None:
    choices = [
        c["choices"][0] for c in chunks_of(served, "/v1/completions", prompt="a", max_tokens=3)
    ]
    assert [(c["text"], c["finish_reason"]) for c in choices] == [
        ("b", None),
        ("c", None),
        ("d", None),
        ("", "length"),
    ]


def test_h05_usage_chunk(served: Served) -> None:
    chunks = chat_chunks(served, max_tokens=5, stream_options={"include_usage": True})
    empty = [chunk for chunk in chunks if not chunk["choices"]]
    assert empty == [chunks[-1]]
    whole = served.chat(max_tokens=5).json()
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [chunks[-1]["usage"][c] for c in counts] == [whole["usage"][c] for c in counts]
    assert whole["usage"]["completion_tokens"] == 5
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert {(c["id"], c["model"], c["created"]) for c in chunks} == {
        (chunks[0]["id"], chunks[0]["model"], chunks[0]["created"])
    }
    off = chat_chunks(served, max_tokens=5, stream_options={"include_usage": False})
    assert all(chunk["choices"] and "usage" not in chunk for chunk in off)


def test_h06_failure_after_the_stream_began(served: Served) -> None:
    with served.client.stream(
        "POST", "/v1/chat/completions", json={"messages": HI, "stream": True}
    ) as response:
        lines = response.iter_lines()
        first = next(lines)
        served.executor.fail_next = MemoryError("injected")
        rest = [line for line in lines if line]
    assert json.loads(first.removeprefix("data: "))["choices"]
    assert rest[-1] == "data: [DONE]"
    error = json.loads(rest[-2].removeprefix("data: "))["error"]
    assert error["type"] == "server_error"
    assert "injected" in error["message"]
    assert served.chat(max_tokens=1).status_code == 200
    served.wait_idle()


def test_r17_failure_without_stream_is_500_and_the_next_request_works(served: Served) -> None:
    served.executor.fail_next = MemoryError("injected")
    response = served.chat(max_tokens=3)
    assert response.status_code == 500
    assert "injected" in response.json()["error"]["message"]
    served.wait_idle()
    assert served.chat(max_tokens=3).json()["choices"][0]["message"]["content"] == "abc"


def test_h08_chat_runs_to_eos_or_to_the_end_of_the_context(served: Served) -> None:
    reply = served.openai.chat.completions.create(model="tiny", messages=HI)  # type: ignore[arg-type]
    assert reply.choices[0].message.content == ALPHABET
    assert reply.choices[0].finish_reason == "stop"
    full = served.chat(ignore_eos=True).json()
    assert full["choices"][0]["finish_reason"] == "length"
    assert full["usage"]["total_tokens"] == 256
    both = served.chat(max_completion_tokens=4).json()
    assert both["usage"]["completion_tokens"] == 4
    assert served.chat(max_completion_tokens=4, max_tokens=5).status_code == 400
    assert served.chat(max_tokens=None, ignore_eos=True).json()["usage"]["total_tokens"] == 256


def test_completions_default_to_16_tokens(served: Served) -> None:
    reply = served.openai.completions.create(model="tiny", prompt="a")
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage
    assert reply.usage.completion_tokens == 16


def test_stop_strings_never_leak(served: Served) -> None:
    for stop in ("fg", ["zz", "fgh"], "éno"):
        text = "".join(
            c["choices"][0]["delta"].get("content", "") for c in chat_chunks(served, stop=stop)
        )
        assert text == ("abcdefghijklm" if stop == "éno" else "abcde")
    whole = served.chat(stop=["zz", "fgh"]).json()["choices"][0]
    assert (whole["finish_reason"], whole["stop_reason"]) == ("stop", "fgh")


def test_multi_byte_characters_stay_whole(served: Served) -> None:
    with served.openai.chat.completions.stream(model="tiny", messages=HI) as stream:  # type: ignore[arg-type]
        deltas = [event.delta for event in stream if event.type == "content.delta"]
    assert "é" in deltas
    assert "".join(deltas) == ALPHABET


def test_chat_logprobs(served: Served) -> None:
    reply = served.openai.chat.completions.create(
        model="tiny",
        messages=HI,  # type: ignore[arg-type]
        logprobs=True,
        top_logprobs=2,
    )
    logprobs = reply.choices[0].logprobs
    assert logprobs
    assert logprobs.content
    data = bytes(b for token in logprobs.content for b in token.bytes or [])
    assert data.decode() == ALPHABET + "</s>"
    assert all(len(token.top_logprobs) == 2 for token in logprobs.content)
    assert all(token.logprob <= 0 for token in logprobs.content)
    streamed = chat_chunks(served, logprobs=True, top_logprobs=2)
    tokens = [t for c in streamed for t in (c["choices"][0]["logprobs"] or {}).get("content", [])]
    assert [t["token"] for t in tokens] == [t.token for t in logprobs.content]
    assert served.chat(top_logprobs=2).json()["error"]["param"] == "top_logprobs"


def test_completion_logprobs_and_echo(served: Served) -> None:
    choice = served.complete(logprobs=2, max_tokens=3).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["b", "c", "d"]
    assert logprobs["text_offset"] == [0, 1, 2]
    assert [len(top) for top in logprobs["top_logprobs"]] == [2, 2, 2]
    assert logprobs["top_logprobs"][0]["b"] == logprobs["token_logprobs"][0]
    echoed = served.complete(echo=True, max_tokens=2).json()
    assert echoed["choices"][0]["text"] == "xabc"
    assert echoed["usage"]["prompt_tokens"] == 2
    text = "".join(
        c["choices"][0]["text"]
        for c in chunks_of(served, "/v1/completions", prompt="xa", echo=True, max_tokens=2)
    )
    assert text == "xabc"
    zero = chunks_of(served, "/v1/completions", prompt="xa", echo=True, max_tokens=0)
    assert "".join(c["choices"][0]["text"] for c in zero) == "xa"


def test_several_prompts_and_samples(served: Served) -> None:
    reply = served.complete(prompt=["a", "c"], n=2, max_tokens=2).json()
    assert [(c["index"], c["text"]) for c in reply["choices"]] == [
        (0, "bc"),
        (1, "bc"),
        (2, "de"),
        (3, "de"),
    ]
    assert reply["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 8,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    ids = served.post("/tokenize", {"prompt": "a"}).json()["tokens"]
    by_ids = served.complete(prompt=[ids, ids], max_tokens=2).json()
    assert [c["text"] for c in by_ids["choices"]] == ["bc", "bc"]
    assert served.complete(prompt=ids, max_tokens=2).json()["choices"][0]["text"] == "bc"
    streamed: dict[int, str] = {}
    for chunk in chunks_of(served, "/v1/completions", prompt=["a", "c"], n=2, max_tokens=2):
        choice = chunk["choices"][0]
        streamed[choice["index"]] = streamed.get(choice["index"], "") + choice["text"]
    assert streamed == {0: "bc", 1: "bc", 2: "de", 3: "de"}
    chat = served.chat(n=3, max_tokens=2).json()
    assert [c["message"]["content"] for c in chat["choices"]] == ["ab"] * 3


def test_sampling_fields_reach_the_engine(served: Served) -> None:
    b = served.post("/tokenize", {"prompt": "b"}).json()["tokens"][0]
    z = served.post("/tokenize", {"prompt": "z"}).json()["tokens"][0]
    assert served.complete(max_tokens=1, stop_token_ids=[b]).json()["choices"][0] == {
        "index": 0,
        "text": "",
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": b,
    }
    allowed = served.complete(max_tokens=1, allowed_token_ids=[z]).json()
    assert allowed["choices"][0]["text"] == "z"
    biased = served.complete(max_tokens=1, logit_bias={str(b): -100}, temperature=0).json()
    assert biased["choices"][0]["text"] != "b"
    hot = {"temperature": 100.0, "max_tokens": 20, "ignore_eos": True}
    seeded = [served.complete(seed=7, **hot).json()["choices"][0]["text"] for _ in range(2)]
    assert seeded[0] == seeded[1]
    other = served.complete(seed=8, **hot).json()["choices"][0]["text"]
    assert other != seeded[0]


def test_filters_that_leave_no_token_are_the_clients_mistake(served: Served) -> None:
    z = served.post("/tokenize", {"prompt": "z"}).json()["tokens"][0]
    fields = {"allowed_token_ids": [z], "bad_words": ["z"], "max_tokens": 2}
    answer = served.complete(**fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "no_token_left")
    assert "bad_words" in error["message"]
    assert '"no_token_left"' in served.complete(stream=True, **fields).text
    assert served.complete(max_tokens=1).status_code == 200


def test_the_openai_client_sees_typed_errors(served: Served) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        served.openai.chat.completions.create(model="tiny", messages=HI, temperature=-1)  # type: ignore[arg-type]
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        served.openai.chat.completions.create(model="none", messages=HI)  # type: ignore[arg-type]
    assert missing.value.code == "model_not_found"


def test_a13_end_tokens_are_the_union_of_all_files() -> None:
    """generation_config names [<s>, f] as a list; </s> stands only in the tokenizer."""
    with serving(tokenizer=alphabet_tokenizer(extra_eos="f")) as served:
        choice = served.chat().json()["choices"][0]
        assert choice["message"]["content"] == "abcde"
        assert choice["finish_reason"] == "stop"
        after_f = served.complete(prompt="f").json()["choices"][0]
        assert after_f["text"] == "ghijklménopqrst"[:15]
        late = served.complete(prompt="f", max_tokens=100).json()["choices"][0]
        assert late["text"] == ALPHABET[6:]
        assert late["finish_reason"] == "stop"
        ignored = served.chat(ignore_eos=True, max_tokens=9).json()  # A14
        assert ignored["usage"]["completion_tokens"] == 9


def test_r22_one_bos_in_a_chat(tmp_path: Path) -> None:
    template = "{{ bos_token }}" + CHATML
    hf = AutoTokenizer.from_pretrained(save_tokenizer(tmp_path, template=template, add_bos=True))
    with serving(tokenizer=Tokenizer.load(tmp_path)) as served:
        expected = hf.apply_chat_template(HI, add_generation_prompt=True)["input_ids"]
        bos = hf.bos_token_id
        assert expected.count(bos) == 1
        reply = served.chat(max_tokens=1).json()
        assert reply["usage"]["prompt_tokens"] == len(expected)
        assert served.post("/tokenize", {"messages": HI}).json()["tokens"] == expected
        assert served.post("/tokenize", {"prompt": "a"}).json()["tokens"][0] == bos


def test_defaults_of_generation_config_apply_and_requests_override_them() -> None:
    defaults = {"temperature": 100.0, "max_tokens": 3}
    with serving(sampling_defaults=defaults, max_num_seqs=2) as served:
        assert served.chat().json()["usage"]["completion_tokens"] == 3
        texts = {served.complete(ignore_eos=True).json()["choices"][0]["text"] for _ in range(3)}
        assert len(texts) == 3
        cool = served.chat(temperature=0, max_tokens=5).json()["choices"][0]
        assert cool["message"]["content"] == "abcde"
    with serving(sampling_defaults={"max_tokens": 10_000}) as served:
        assert served.chat(ignore_eos=True).json()["usage"]["total_tokens"] == 256


def test_the_servers_seed_repeats_a_run() -> None:
    def run(seed: int) -> list[str]:
        with serving(seed=seed) as served:
            hot = {"temperature": 100.0, "ignore_eos": True}
            return [served.complete(**hot).json()["choices"][0]["text"] for _ in range(2)]

    first = run(1)
    assert first[0] != first[1]
    assert run(1) == first
    assert run(2) != first
