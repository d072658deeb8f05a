"""The events that a stream is made of, and in how many pieces they leave."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from qdeploy.runtime.outputs import RequestMetrics, RequestOutput, TokenLogprob
from qdeploy.runtime.request_stream import RequestAbortedError, RequestStream
from qdeploy.runtime.sampling_params import SamplingParams
from qdeploy.server.chat_reply import ChatReply
from qdeploy.server.completion_reply import CompletionReply
from qdeploy.server.generation import _events
from qdeploy.server.prompts import Prompt
from qdeploy.server.replies import event


def output(text: str, index: int = 0, **fields: Any) -> RequestOutput:
    return RequestOutput(
        request_id="0",
        index=index,
        token_ids=(5,),
        text=text,
        num_prompt_tokens=3,
        num_output_tokens=7,
        metrics=RequestMetrics(arrival_time=0.0),
        **fields,
    )


def replies(usage: bool) -> list[ChatReply | CompletionReply]:
    name = 'a "model" \\ of %s {0} é'
    return [
        ChatReply(name, None, n=3, logprobs=False, include_usage=usage),  # type: ignore[arg-type]
        CompletionReply(name, None, n=3, logprobs=None, include_usage=usage),  # type: ignore[arg-type]
    ]


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(st.characters(exclude_categories=("Cs",)), max_size=12),
    prompt=st.integers(0, 1),
    index=st.integers(0, 2),
    usage=st.booleans(),
)
@example(text="\0", prompt=0, index=0, usage=False)
@example(text='"\\\n\x7f\u2028{}%s', prompt=1, index=2, usage=True)
def test_the_short_way_writes_what_the_long_way_writes(
    text: str, prompt: int, index: int, usage: bool
) -> None:
    for reply in replies(usage):
        item = output(text, index)
        expected = "".join(event(chunk) for chunk in reply.chunks(prompt, item))
        for _ in range(2):  # the second one comes from what the first one kept
            assert reply.text_event(prompt, item) == expected


def test_output_with_more_than_text_goes_the_long_way() -> None:
    token = TokenLogprob(token_id=5, logprob=-1.0, rank=1)
    for reply in replies(False):
        assert reply.text_event(0, output("a", finish_reason="stop")) is None
        assert reply.text_event(0, output("a", logprobs=(token,))) is None
        assert reply.text_event(0, output("a", prompt_logprobs=(None, token))) is None


def stream_of(count: int) -> RequestStream:
    prompts = [(str(i), [1], SamplingParams()) for i in range(count)]
    return RequestStream(prompts, None, lambda stream, abort: None)


async def pieces_of(stream: RequestStream) -> list[str]:
    reply = replies(False)[1]
    return [piece async for piece in _events(stream, reply, [Prompt(token_ids=[1])], False)]


def test_outputs_that_wait_leave_in_one_piece() -> None:
    async def scenario() -> list[str]:
        stream = stream_of(1)
        reader = asyncio.ensure_future(pieces_of(stream))
        for text in "ab":
            stream.put(output(text))
        await asyncio.sleep(0.01)
        stream.put(output("c", finish_reason="stop"))
        return await reader

    first, second, done = asyncio.run(scenario())
    texts = [json.loads(line[6:])["choices"][0]["text"] for line in first.split("\n\n") if line]
    assert texts == ["a", "b"]
    assert second.count("data: ") == 2
    assert done == "data: [DONE]\n\n"


def test_an_error_comes_after_what_was_put_before_it() -> None:
    async def scenario() -> list[str]:
        stream = stream_of(1)
        stream.put(output("a"))
        stream.put(RequestAbortedError("going down"))
        stream.put(output("lost"))
        return await pieces_of(stream)

    first, error, done = asyncio.run(scenario())
    assert '"text":"a"' in first
    assert "going down" in error
    assert done == "data: [DONE]\n\n"


def test_a_failed_sample_ends_its_stream_with_the_error() -> None:
    async def scenario() -> list[str]:
        stream = stream_of(1)
        stream.put(output("", finish_reason="error", error="NaN logits"))
        return await pieces_of(stream)

    error, done = asyncio.run(scenario())
    assert "NaN logits" in error
    assert done == "data: [DONE]\n\n"


def test_a_closed_stream_hands_nothing_out() -> None:
    async def scenario() -> None:
        stream = stream_of(1)
        stream.put(output("a"))
        stream.close()
        assert list(stream.ready()) == []
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    asyncio.run(scenario())
