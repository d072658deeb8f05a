"""How long decoding streams stall when a long prompt arrives."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from typing import Any

from figures import Row, row
from runtime_session import Session, Setup, insist

STREAMS = 4
#: Tokens that each stream has when the prompt arrives.
HEAD_START = 8


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
