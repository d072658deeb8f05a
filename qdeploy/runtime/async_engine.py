"""One thread runs the engine's steps; asyncio submits requests to it and reads their outputs.

Only that thread touches the Engine. Commands reach it through a deque under a condition, on
which it sleeps while nothing is unfinished; outputs go back with call_soon_threadsafe, once a
step. Closing a stream (a client that left) aborts its requests before the next step.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Protocol

from qdeploy.runtime.outputs import EngineStats, RequestOutput
from qdeploy.runtime.request_stream import (
    EngineDeadError,
    QueueFullError,
    RequestAbortedError,
    RequestStream,
    ServerDrainingError,
    Submission,
)
from qdeploy.runtime.sampling_params import SamplingParams

logger = logging.getLogger(__name__)


class SteppingEngine(Protocol):
    """What the thread needs of qdeploy.runtime.engine.Engine."""

    max_model_len: int

    def add_request(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> None: ...

    def abort(self, request_id: str) -> object: ...

    def step(self) -> list[RequestOutput]: ...

    @property
    def has_unfinished(self) -> bool: ...

    def stats(self) -> EngineStats: ...


class StepObserver(Protocol):
    """Told of every step, on the engine's thread (metrics)."""

    def on_step(self, outputs: Sequence[RequestOutput], stats: EngineStats) -> None: ...


class AsyncEngine:
    """Feeds an Engine from asyncio.

    max_waiting: samples that may be open beyond max_num_seqs before QueueFullError.
    request_timeout: seconds from submission to the last token, None for no limit.
    """

    def __init__(
        self,
        engine: SteppingEngine,
        *,
        max_num_seqs: int = 16,
        max_waiting: int = 256,
        request_timeout: float | None = None,
        observer: StepObserver | None = None,
    ) -> None:
        self._engine = engine
        self.max_num_seqs = max_num_seqs
        self.max_model_len = engine.max_model_len
        self._max_open = max_num_seqs + max_waiting
        self._request_timeout = request_timeout
        self.observer = observer
        self.stats: EngineStats = engine.stats()
        self.error: BaseException | None = None
        self._condition = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._stopping = False
        self._draining = False
        self._busy_since: float | None = None
        self._streams: dict[str, RequestStream] = {}  # event loop only
        self._open_samples = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="qdeploy-engine", daemon=True)

    def start(self) -> None:
        """Start the thread; call once, from the event loop that will submit."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the engine's thread can still answer."""
        return self.error is None and self._thread.is_alive()

    @property
    def draining(self) -> bool:
        """Whether new requests are refused because of a shutdown."""
        return self._draining

    @property
    def last_step_age(self) -> float:
        """Seconds since the step that is running began, or since the last one ended with work
        left; 0 while idle.
        """
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    @property
    def num_open_requests(self) -> int:
        """Requests whose streams are open."""
        return len(self._streams)

    async def generate(
        self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams
    ) -> AsyncIterator[RequestOutput]:
        """Outputs of one prompt; closing the generator aborts the request."""
        stream = await self.submit([(request_id, prompt_ids, params)])
        try:
            async for output in stream:
                yield output
        finally:
            stream.close()

    async def submit(self, submissions: Sequence[Submission]) -> RequestStream:
        """Admit all prompts or none; returns once the engine has accepted them.

        Raises what Engine.add_request raises (UsageError, CapacityError), QueueFullError,
        ServerDrainingError or EngineDeadError.
        """
        self._check_admission(sum(params.n for _, _, params in submissions))
        stream = RequestStream(submissions, self._request_timeout, self._release)
        self._open_samples += stream.num_samples
        self._streams.update(dict.fromkeys(stream.request_ids, stream))
        try:
            self._send(lambda: self._add(submissions, stream.accepted))
            await stream.accepted
        except BaseException:
            stream.close()
            raise
        return stream

    def _release(self, stream: RequestStream, abort: bool) -> None:
        """Forget a stream; called by RequestStream.close."""
        self._open_samples -= stream.num_samples
        for request_id in stream.request_ids:
            self._streams.pop(request_id, None)
        if abort:
            with contextlib.suppress(EngineDeadError):  # a dead engine has nothing to abort
                self._send(lambda: self._abort(stream.request_ids))

    async def drain(self, timeout: float) -> None:
        """Refuse new requests, wait up to `timeout` seconds for open ones, abort the rest."""
        self._draining = True
        deadline = time.monotonic() + timeout
        while self._streams and self.error is None and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        for stream in set(self._streams.values()):
            stream.put(RequestAbortedError("the server is shutting down; send the request again"))

    async def stop(self) -> None:
        """End the thread after its current step."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        await asyncio.to_thread(self._thread.join, 10.0)

    def _check_admission(self, num_samples: int) -> None:
        if self.error is not None:
            raise self._dead()
        if self._draining:
            raise ServerDrainingError("the server is shutting down and takes no new requests")
        if self._open_samples and self._open_samples + num_samples > self._max_open:
            raise QueueFullError(
                f"{self._open_samples} sequences are open, of which {self.max_num_seqs} can run "
                f"at a time; with this request's {num_samples} they would exceed "
                f"{self._max_open} (--max-num-seqs plus --max-queued-requests); try again later"
            )

    def _dead(self) -> EngineDeadError:
        return EngineDeadError(
            f"the engine died ({type(self.error).__name__}: {self.error}); restart the server"
        )

    def _send(self, command: Callable[[], None]) -> None:
        with self._condition:
            if self.error is not None:
                raise self._dead()
            self._commands.append(command)
            self._condition.notify()

    # --- engine thread -------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._run_commands()
                if self._engine.has_unfinished:
                    self._step()
                else:
                    self._busy_since = None
                    self.stats = self._engine.stats()
        except BaseException as error:
            logger.critical("the engine died", exc_info=error)
            self._die(error)

    def _wait_for_work(self) -> bool:
        with self._condition:
            while not (self._stopping or self._commands or self._engine.has_unfinished):
                self._condition.wait()
            return not self._stopping

    def _run_commands(self) -> None:
        while True:
            with self._condition:
                if not self._commands:
                    return
                command = self._commands.popleft()
            command()

    def _step(self) -> None:
        self._busy_since = time.monotonic()
        outputs = self._engine.step()
        self._busy_since = time.monotonic() if self._engine.has_unfinished else None
        self.stats = self._engine.stats()
        if self.observer is not None:
            self.observer.on_step(outputs, self.stats)
        if outputs:
            self._on_loop(lambda: self._deliver(outputs))

    def _add(self, submissions: Sequence[Submission], accepted: asyncio.Future[None]) -> None:
        try:
            for request_id, prompt_ids, params in submissions:
                self._engine.add_request(request_id, prompt_ids, params)
        except Exception as error:  # `submit` closes the stream, which aborts those added before
            refused = error
            self._on_loop(lambda: _settle(accepted, refused))
            return
        self._on_loop(lambda: _settle(accepted, None))

    def _abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._engine.abort(request_id)

    def _die(self, error: BaseException) -> None:
        with self._condition:
            self.error = error
            self._commands.clear()
        self._on_loop(self._fail_all)

    def _on_loop(self, callback: Callable[[], None]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:  # the loop has closed: nobody waits for outputs any more
            logger.debug("outputs dropped: the event loop is closed")

    # --- event loop ----------------------------------------------------------------------------

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.put(output)

    def _fail_all(self) -> None:
        for stream in set(self._streams.values()):
            _settle(stream.accepted, self._dead())
            stream.put(self._dead())


def _settle(future: asyncio.Future[None], error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
