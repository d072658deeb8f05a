"""Runs a request through the engine and answers it whole or as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from qdeploy.runtime.outputs import CompletionOutput, GenerationOutput, RequestOutput
from qdeploy.runtime.request_stream import RequestStream
from qdeploy.runtime.sampling_params import SamplingParams
from qdeploy.server.context import ServerContext
from qdeploy.server.errors import ApiError, bad_request, to_api_error
from qdeploy.server.prompts import Prompt
from qdeploy.server.replies import Reply, event, usage

_T = TypeVar("_T")
_DONE = "data: [DONE]\n\n"


async def answer(
    request: Request,
    context: ServerContext,
    reply: Reply,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    stream: bool,
    include_usage: bool,
) -> Response:
    """Submit the prompts together; what the engine refuses is raised before any header (H06)."""
    submissions = [(context.next_id(), prompt.token_ids, params) for prompt in prompts]
    outputs = await context.engine.submit(submissions)
    if stream:
        events = _events(outputs, reply, prompts, include_usage)
        return EventStream(events, outputs)
    try:
        results = await until_disconnect(request, _collect(outputs, prompts, params.n))
    finally:
        outputs.close()
    if params.prompt_logprobs is not None:  # a long prompt's takes a while
        return JSONResponse(await asyncio.to_thread(reply.whole, results))
    return JSONResponse(reply.whole(results))


async def _collect(
    outputs: RequestStream, prompts: Sequence[Prompt], n: int
) -> list[GenerationOutput]:
    results = {
        request_id: GenerationOutput(
            request_id=request_id,
            prompt=prompt.text,
            prompt_token_ids=prompt.token_ids,
            outputs=[CompletionOutput(index=i) for i in range(n)],
        )
        for request_id, prompt in zip(outputs.request_ids, prompts, strict=True)
    }
    async for output in outputs:
        _raise_failed(output)
        results[output.request_id].add(output)
    return list(results.values())


def _raise_failed(output: RequestOutput) -> None:
    if output.unanswerable:
        raise bad_request(f"{output.error}; allow more", code="no_token_left")
    if output.finish_reason == "error":
        raise ApiError(500, output.error or "the engine failed", code="engine_error")


async def _events(
    outputs: RequestStream, reply: Reply, prompts: Sequence[Prompt], include_usage: bool
) -> AsyncIterator[str]:
    order = {request_id: i for i, request_id in enumerate(outputs.request_ids)}
    generated: dict[tuple[str, int], int] = {}
    cached: dict[str, int] = {}
    try:
        for chunk in reply.opening():
            yield event(chunk)
        async for first in outputs:
            # what has queued up meanwhile goes out in one write: a loop that lags catches up
            ready = [first, *outputs.ready()]
            for output in ready:
                generated[output.request_id, output.index] = output.num_output_tokens
                cached[output.request_id] = output.num_cached_tokens
            text = "".join(_text_of(reply, order[item.request_id], item) for item in ready)
            if text:
                yield text
        if include_usage:
            prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
            counts = usage(prompt_tokens, sum(generated.values()), sum(cached.values()))
            yield event(reply.usage_chunk(counts))
    except Exception as error:
        # the status is sent: the error travels in the stream, which then ends as usual (H06)
        yield f"data: {to_api_error(error).json()}\n\n"
    yield _DONE


def _text_of(reply: Reply, prompt: int, output: RequestOutput) -> str:
    """The events of one output."""
    _raise_failed(output)
    fast = reply.text_event(prompt, output)
    if fast is not None:
        return fast
    return "".join(event(chunk) for chunk in reply.chunks(prompt, output))


async def until_disconnect(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """Run `work`, cancelled when the client closes the connection (H14)."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A text/event-stream that ends its request's work as soon as the client is gone."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[str], outputs: RequestStream | None) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._outputs = outputs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = asyncio.ensure_future(self._send_all(send))
        watcher = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((sender, watcher), return_when=asyncio.FIRST_COMPLETED)
            if sender.done():
                sender.result()
        finally:
            watcher.cancel()
            sender.cancel()
            if self._outputs is not None:
                self._outputs.close()

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async for text in self._events:
            body = text.encode("utf-8")
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
