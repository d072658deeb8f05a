"""Speculation through `qdeploy serve` and the openai client, on the real model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.test_serve_command import started

pytestmark = pytest.mark.model
CAPITAL = "What is the capital of France?"
ROWS = json.dumps([{"id": i, "name": f"item {i}", "in_stock": True} for i in range(8)], indent=1)
COPY = f"Return this JSON unchanged:\n{ROWS}"


@pytest.fixture(scope="module")
def clients(smollm2_folder: Path) -> Iterator[tuple[openai.OpenAI, openai.OpenAI]]:
    """Without speculation and with it."""
    options = [str(smollm2_folder), "--kv-cache-dtype", "int8", "--max-num-seqs", "4"]
    options += ["--max-model-len", "2048"]
    ngram = ["--speculative-method", "ngram", "--num-speculative-tokens", "8"]
    with ExitStack() as stack:
        urls = [stack.enter_context(started(*options, *more))[1] for more in ([], ngram)]
        yield tuple(openai.OpenAI(base_url=f"{u}/v1", api_key="none") for u in urls)  # type: ignore[misc]


def model_of(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def metrics(client: openai.OpenAI) -> dict[str, float]:
    text = httpx.get(str(client.base_url).replace("/v1/", "/metrics")).text
    return {
        sample.name.removeprefix("qdeploy:"): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("qdeploy:spec_decode") and not sample.labels
    }


Clients = tuple[openai.OpenAI, openai.OpenAI]


def test_r14_r16_copied_json_comes_sooner_and_is_the_same(clients: Clients) -> None:
    plain, drafted = (answer(c, COPY, max_tokens=200) for c in clients)
    assert drafted == plain
    found = metrics(clients[1])
    assert found["spec_decode_num_accepted_tokens_total"] > 0
    assert (
        found["spec_decode_num_draft_tokens_total"]
        >= found["spec_decode_num_accepted_tokens_total"]
    )
    assert 0 < found["spec_decode_acceptance_rate"] <= 1
    assert metrics(clients[0])["spec_decode_num_drafts_total"] == 0


def answer(client: openai.OpenAI, content: str, **options: Any) -> tuple[Any, ...]:
    found = ask(client, content, **options)
    choice = found.choices[0]
    return choice.message.content, choice.finish_reason, found.usage.completion_tokens


def ask(client: openai.OpenAI, content: str, **options: Any) -> Any:
    messages: list[Any] = [{"role": "user", "content": content}]
    body = {"temperature": 0, "max_tokens": 60, **options}
    return client.chat.completions.create(model=model_of(client), messages=messages, **body)


def test_r14_the_text_and_the_usage_end_at_eos(clients: Clients) -> None:
    found = [answer(client, CAPITAL) for client in clients]
    assert found[0] == found[1]
    text, reason, tokens = found[1]
    assert "Paris" in text
    assert reason == "stop"
    assert tokens < 30


@pytest.mark.parametrize(
    "options",
    [
        {"logit_bias": {"7042": -100}},
        {"extra_body": {"min_tokens": 30}},
        {"extra_body": {"repetition_penalty": 1.5}},
        {"frequency_penalty": 1.0},
        {"temperature": 1.0, "seed": 5, "top_p": 0.9},
        {"stop": ["is the", "name"]},
    ],
    ids=str,
)
def test_r13_options_mean_the_same_with_drafts(clients: Clients, options: dict[str, Any]) -> None:
    for content in (CAPITAL, COPY):
        plain, drafted = (answer(client, content, **options) for client in clients)
        assert drafted == plain


def test_a_stream_with_logprobs_equals_the_whole_answer(clients: Clients) -> None:
    options: dict[str, Any] = {"logprobs": True, "top_logprobs": 2, "max_tokens": 80}
    whole = [ask(client, COPY, **options).choices[0] for client in clients]
    assert whole[0].logprobs == whole[1].logprobs
    chunks = list(ask(clients[1], COPY, stream=True, **options))
    text = "".join(c.choices[0].delta.content or "" for c in chunks)
    tokens = [t for c in chunks if c.choices[0].logprobs for t in c.choices[0].logprobs.content]
    assert text == whole[1].message.content
    assert tokens == whole[1].logprobs.content


def test_r15_the_same_prompt_many_times_and_in_company(clients: Clients) -> None:
    alone = answer(clients[0], COPY, max_tokens=80)
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(answer, clients[1], COPY, max_tokens=80) for _ in range(12)]
        jobs += [pool.submit(answer, clients[1], f"Write {n} words.") for n in (3, 5)]
        assert [job.result() for job in jobs[:12]] == [alone] * 12


def test_r11_first_tokens_are_drawn_as_without_drafts(clients: Clients) -> None:
    """The same seeds give the same tokens, so that frequencies can't differ."""
    for seed in range(8):
        options = {"temperature": 1.0, "seed": seed, "max_tokens": 12}
        plain, drafted = (answer(client, COPY, **options) for client in clients)
        assert drafted == plain
