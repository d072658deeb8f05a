"""First tokens after a shared prompt, and how long decoding streams stall for a long one."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from typing import Any

from figures import Row, row
from runtime_session import Session, Setup, Trace, insist

#: System prompts of a repeat, and tokens of the question that follows one.
PROMPTS, QUESTION = 5, 16
STREAMS = 4
#: Tokens that each stream has when the prompt arrives.
HEAD_START = 8


def prefix(setup: Setup) -> Iterator[Row]:
    """Time to the first token after a long system prompt, new to the engine and known to it."""
    cold, warm = [], []
    for seed in range(setup.repeats):
        session, alone = setup.session(), setup.session(enable_prefix_caching=False)
        lengths = [setup.sizes.system] * PROMPTS + [QUESTION] * (2 * PROMPTS)
        passages = setup.prompts(lengths, seed)
        for system in passages[:PROMPTS]:
            first, second = passages.pop(), passages.pop()
            cold.append(_answer(session, system + first).first_s)
            warm.append((trace := _answer(session, system + second)).first_s)
            same = _answer(alone, system + second)
            insist(trace.token_ids == same.token_ids, "a prefix hit changes an answer")
    against = f"{1e3 * statistics.median(cold):.0f} ms when it is new"
    ratio = statistics.median(a / b for a, b in zip(warm, cold, strict=True))
    name = setup.name(f"first token after a shared prompt of {setup.sizes.system:,} tokens")
    yield row(name, 1e3 * statistics.median(warm), "ms", len(warm), ratio, against)


def _answer(session: Session, prompt: list[int]) -> Trace:
    trace = session.ask(prompt, 4)
    session.finish()
    return trace


def stall(setup: Setup) -> Iterator[Row]:
    """Longest gap between tokens of decoding streams while a long prompt is read, with chunked
    prefill and without; against the mean time of a chunk when that prompt is alone.
    """
    sizes = setup.sizes
    whole: dict[str, Any] = {
        "max_model_len": sizes.long_prompt + 128,
        "max_num_batched_tokens": sizes.long_prompt + 128,
        "enable_chunked_prefill": False,
    }
    chunked: dict[str, Any] = {"max_num_batched_tokens": sizes.max_tokens}
    chunks, gaps, unchunked = [], [], []
    for seed in range(setup.repeats):
        chunks.append(_chunk_seconds(setup.session(**chunked), setup, seed))
        gap, answers = _longest_gap(setup.session(**chunked), setup, seed)
        gaps.append(gap)
        gap, same = _longest_gap(setup.session(**whole), setup, seed)
        unchunked.append(gap)
        insist(answers == same, "chunked prefill changes an answer")
    against = f"a chunk's mean time, {1e3 * statistics.median(chunks):.0f} ms"
    for title, found in (("", gaps), (", prompts whole", unchunked)):
        ratio = statistics.median(a / b for a, b in zip(found, chunks, strict=True))
        name = setup.name(f"longest gap of {STREAMS} streams{title}")
        yield row(name, 1e3 * statistics.median(found), "ms", setup.repeats, ratio, against)


def _chunk_seconds(session: Session, setup: Setup, seed: int) -> float:
    """Mean time of the steps that read the long prompt."""
    (prompt,) = setup.prompts([setup.sizes.long_prompt], seed)
    session.ask(prompt, 1)
    steps = 0

    def count() -> None:
        nonlocal steps
        steps += 1

    return session.finish(count) / steps


def _longest_gap(session: Session, setup: Setup, seed: int) -> tuple[float, list[list[int]]]:
    """Seconds, and what the streams said."""
    prompt, *openings = setup.prompts([setup.sizes.long_prompt, *[32] * STREAMS], seed)
    streams = [session.ask(opening, 64) for opening in openings]
    while min(len(stream.token_ids) for stream in streams) < HEAD_START:
        session.step()
    long = session.ask(prompt, 1)
    while not long.token_ids:
        session.step()
    arrived = long.times_s[0]
    session.finish()
    gaps = [
        after - before
        for stream in streams
        for before, after in itertools.pairwise(stream.times_s)
        if after > long.asked_s and before < arrived
    ]
    return max(gaps), [stream.token_ids for stream in streams]
