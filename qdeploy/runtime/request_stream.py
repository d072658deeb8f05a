"""What a client of the AsyncEngine holds: the outputs of its request, and how they may fail."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

from qdeploy.runtime.outputs import RequestOutput
from qdeploy.runtime.sampling_params import SamplingParams


class EngineDeadError(Exception):
    """The engine's thread died; the process must be restarted."""


class QueueFullError(Exception):
    """More requests wait than max_queued_requests allows."""


class ServerDrainingError(Exception):
    """The server shuts down and admits nothing."""


class RequestAbortedError(Exception):
    """The request was ended by the server before it finished."""


class RequestTimeoutError(Exception):
    """The request took longer than request_timeout."""


#: One prompt to generate for: its engine request id, its tokens, its parameters.
Submission = tuple[str, Sequence[int], SamplingParams]


class RequestStream:
    """The outputs of one or more prompts that were submitted together, in order of arrival.

    Ends when every sample has finished; raises RequestTimeoutError, RequestAbortedError or
    EngineDeadError. `close` (idempotent) aborts what is unfinished.

    timeout: seconds from now to the last token. release: told once of the end, and whether
    samples are left to abort.
    """

    def __init__(
        self,
        submissions: Sequence[Submission],
        timeout: float | None,
        release: Callable[[RequestStream, bool], None],
    ) -> None:
        self.request_ids = tuple(request_id for request_id, _, _ in submissions)
        self.num_samples = sum(params.n for _, _, params in submissions)
        self._release = release
        self._unfinished = self.num_samples
        self._outputs: deque[RequestOutput] = deque()
        self._error: Exception | None = None
        self._waiting: asyncio.Future[None] | None = None
        self._closed = False
        loop = asyncio.get_running_loop()
        self.accepted: asyncio.Future[None] = loop.create_future()
        # One timer a request: asyncio.wait_for would cost a task a token.
        self._timer = None if timeout is None else loop.call_later(timeout, self._expire, timeout)

    def put(self, item: RequestOutput | Exception) -> None:
        """Called on the event loop by the engine; nothing comes after an error."""
        if self._error is not None:
            return
        if isinstance(item, Exception):
            self._error = item
        else:
            self._outputs.append(item)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._unfinished == 0 or self._closed:
            self.close()
            raise StopAsyncIteration
        if not self._outputs and self._error is None:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        if not self._outputs and self._error is not None:
            self.close()
            raise self._error
        return self._take()

    def ready(self) -> Iterator[RequestOutput]:
        """Outputs that have arrived already."""
        while self._outputs and not self._closed:
            yield self._take()

    def _take(self) -> RequestOutput:
        output = self._outputs.popleft()
        if output.finished:
            self._unfinished -= 1
            if self._unfinished == 0:
                self.close()
        return output

    def _expire(self, timeout: float) -> None:
        self.put(RequestTimeoutError(f"the request took longer than request_timeout={timeout:g} s"))

    def close(self) -> None:
        """Give up on the rest: aborts unfinished samples and frees their blocks."""
        if not self._closed:
            self._closed = True
            if self._timer is not None:
                self._timer.cancel()
            self._release(self, self._unfinished > 0)
