"""AsyncEngine without HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from qdeploy.errors import UsageError
from qdeploy.runtime.async_engine import AsyncEngine
from qdeploy.runtime.engine import Engine
from qdeploy.runtime.engine_config import EngineConfig
from qdeploy.runtime.request_stream import (
    EngineDeadError,
    QueueFullError,
    ServerDrainingError,
)
from qdeploy.runtime.sampling_params import SamplingParams
from server.harness import ALPHABET, KV, AlphabetExecutor, alphabet_tokenizer

TOKENIZER = alphabet_tokenizer()
A = TOKENIZER.encode("a")
LONG = SamplingParams(temperature=0, max_tokens=None)
ENDLESS = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)


def run(body: Callable[[AsyncEngine, Engine], Awaitable[None]], step_s: float = 0.0) -> None:
    async def main() -> None:
        executor = AlphabetExecutor(TOKENIZER)
        executor.step_s = step_s
        config = EngineConfig(kv=KV, max_num_seqs=4)
        core = Engine(executor, config, TOKENIZER.eos_token_ids, tokenizer=TOKENIZER)  # type: ignore[arg-type]
        engine = AsyncEngine(core, max_num_seqs=4, max_waiting=4)
        engine.start()
        try:
            await body(engine, core)
        finally:
            await engine.stop()
        core.scheduler.check_integrity()

    asyncio.run(main())


async def idle(engine: AsyncEngine, core: Engine) -> None:
    while core.has_unfinished or engine.num_open_requests:
        await asyncio.sleep(0.005)
    assert engine.stats.num_open_blocks_used == engine.stats.num_sealed_blocks_used == 0


def test_generate_yields_the_text_in_pieces() -> None:
    async def body(engine: AsyncEngine, core: Engine) -> None:
        outputs = [output async for output in engine.generate("r", A, LONG)]
        assert "".join(output.text for output in outputs) == ALPHABET[1:]
        assert outputs[-1].finish_reason == "stop"
        await idle(engine, core)
        assert engine.last_step_age == 0

    run(body)


def test_a_step_reaches_the_loop_in_one_call_whatever_it_brings() -> None:
    async def body(engine: AsyncEngine, core: Engine) -> None:
        loop, calls = asyncio.get_running_loop(), 0
        original = loop.call_soon_threadsafe

        def counting(*args: object, **options: object) -> object:
            nonlocal calls
            calls += 1
            return original(*args, **options)  # type: ignore[arg-type]

        four = SamplingParams(n=4, temperature=0, ignore_eos=True, max_tokens=20)
        loop.call_soon_threadsafe = counting  # type: ignore[assignment, method-assign]
        stream = await engine.submit([("r", A, four)])
        outputs = [output async for output in stream]
        assert len(outputs) == 80
        # one a step, and the acceptance
        assert calls <= core.stats().num_steps + 1

    run(body, step_s=0.001)


def test_closing_a_generator_aborts_its_request() -> None:
    async def body(engine: AsyncEngine, core: Engine) -> None:
        stream = engine.generate("r", A, ENDLESS)
        await stream.__anext__()
        assert engine.last_step_age < 1
        await stream.aclose()  # type: ignore[attr-defined]
        await idle(engine, core)
        assert engine.stats.finished["abort"] == 1

    run(body, step_s=0.01)


def test_a_refused_prompt_takes_its_companions_with_it() -> None:
    async def body(engine: AsyncEngine, core: Engine) -> None:
        with pytest.raises(UsageError):
            await engine.submit([("a", A, ENDLESS), ("b", [10**6], ENDLESS)])
        await idle(engine, core)
        assert [o async for o in engine.generate("c", A, LONG)][-1].finished

    run(body)


def test_the_queue_is_bounded_in_samples() -> None:
    async def body(engine: AsyncEngine, core: Engine) -> None:
        four = SamplingParams(n=4, ignore_eos=True, max_tokens=100)
        streams = [await engine.submit([(str(i), A, four)]) for i in range(2)]
        with pytest.raises(QueueFullError):
            await engine.submit([("more", A, LONG)])
        for stream in streams:
            stream.close()
            stream.close()
        await engine.submit([("later", A, LONG)])

    run(body, step_s=0.005)


def test_draining_refuses_new_requests_and_waits_for_open_ones() -> None:
    async def body(engine: AsyncEngine, core: Engine) -> None:
        stream = await engine.submit([("r", A, LONG)])
        drain = asyncio.ensure_future(engine.drain(10))
        await asyncio.sleep(0)
        with pytest.raises(ServerDrainingError):
            await engine.submit([("late", A, LONG)])
        assert "".join([o.text async for o in stream]) == ALPHABET[1:]
        await drain

    run(body, step_s=0.005)


def test_a_cancelled_submission_leaves_nothing() -> None:
    async def body(engine: AsyncEngine, core: Engine) -> None:
        other = await engine.submit([("other", A, ENDLESS)])
        await other.__anext__()
        task = asyncio.ensure_future(engine.submit([("r", A, ENDLESS)]))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        other.close()
        await idle(engine, core)

    run(body, step_s=0.05)


def test_r10_submissions_in_flight_fail_with_the_engine() -> None:
    async def body(engine: AsyncEngine, core: Engine) -> None:
        def die(*_args: object) -> None:
            raise SystemExit("injected")

        core.add_request = die  # type: ignore[method-assign]
        with pytest.raises(EngineDeadError, match="injected"):
            await asyncio.wait_for(engine.submit([("r", A, LONG)]), 5)
        assert not engine.alive
        with pytest.raises(EngineDeadError):
            await engine.submit([("s", A, LONG)])

    run(body)
