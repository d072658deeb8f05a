"""What it costs that a sequence loses its blocks and comes back, recomputed or swapped."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from figures import Row, row
from runtime_session import Session, Setup, insist

MODES = ("recompute", "swap", "auto")
#: The older request needs its first sealed block at token 128, when the newer one, which stays in
#: the block that follows its prompt, holds all of them.
OLDER_PROMPT, OLDER_OUTPUT, NEWER_OUTPUT = 70, 70, 63


def preemption(setup: Setup) -> Iterator[Row]:
    """Time of a preempted sequence's leaving and coming back, beyond that of decode steps."""
    for length in setup.sizes.preempted:
        costs: dict[str, list[float]] = {mode: [] for mode in MODES}
        choice = ""
        for seed in range(setup.repeats):
            answers = []
            for mode in MODES:
                session = _tight_session(setup, mode, length)
                seconds, answer = _run(session, setup, length, seed)
                costs[mode].append(seconds)
                answers.append(answer)
                choice = "swap" if session.engine.scheduler.num_swaps else "recompute"
            insist(answers[0] == answers[1] == answers[2], "preemption changes an answer")
        for mode, found in costs.items():
            ratio = statistics.median(a / b for a, b in zip(found, costs["recompute"], strict=True))
            against = "recompute" + (f"; it chose {choice}" if mode == "auto" else "")
            name = setup.name(f"preempting {length:,} tokens, {mode}")
            cost = 1e3 * statistics.median(found)
            yield row(name, cost, "ms", setup.repeats, ratio, against)


def _tight_session(setup: Setup, mode: str, length: int) -> Session:
    """Room for the newer sequence, and for the older one until it has 128 tokens."""
    longest = length + NEWER_OUTPUT
    num_sealed = longest // 64 - 1  # but for the sink
    options: dict[str, Any] = {
        "max_num_seqs": 2,
        "max_model_len": longest,
        "max_num_batched_tokens": setup.sizes.max_tokens,
        "preemption": mode,
        "enable_prefix_caching": False,  # what is still there when it comes back depends on luck
    }
    for total in range(num_sealed + 2 * 2, num_sealed + 12):  # with sinks and tails of both
        stats = setup.session(stand_in=True, num_kv_blocks=total, **options).engine.stats()
        if stats.num_sealed_blocks == num_sealed and stats.num_open_blocks >= 4:
            return setup.session(num_kv_blocks=total, **options)
    raise SystemExit(f"no cache has {num_sealed} sealed blocks and room for two sequences")


def _run(session: Session, setup: Setup, length: int, seed: int) -> tuple[float, list[int]]:
    """Seconds that the preemption of the newer request costs, and its answer."""
    prompts = setup.prompts([OLDER_PROMPT, length], seed)
    older = session.ask(prompts[0], OLDER_OUTPUT)
    newer = session.ask(prompts[1], NEWER_OUTPUT)
    scheduler, alone = session.engine.scheduler, []
    while not scheduler.num_preemptions:
        insist(session.engine.has_unfinished, "no request was preempted")
        leaving = session.step()
    insist(bool(newer.token_ids), "the newer request was preempted before its first token")
    while len(older.token_ids) < OLDER_OUTPUT:
        alone.append(session.step())
    given, coming = len(newer.token_ids), 0.0
    while len(newer.token_ids) == given:
        coming += session.step()
    session.finish()
    insist(scheduler.num_preemptions == 1, "the newer request was preempted more than once")
    return leaving + coming - 2 * statistics.median(alone), newer.token_ids
