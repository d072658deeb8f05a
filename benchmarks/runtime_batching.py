"""Continuous against static batching, how full the blocks are, and paging against reservations."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from figures import Row, row
from runtime_session import Session, Setup, insist

from qdeploy.runtime.engine import Engine

#: A prompt, and how many tokens its answer has.
Ask = tuple[list[int], int]


def workload(setup: Setup, seed: int) -> list[Ask]:
    """Prompts of uniform and answers of lognormal length."""
    sizes, chooser = setup.sizes, random.Random(seed)
    prompts = [chooser.randint(*sizes.prompt) for _ in range(sizes.requests)]
    drawn = [chooser.lognormvariate(math.log(sizes.median), 1.0) for _ in prompts]
    outputs = [min(sizes.limit, max(1, round(length))) for length in drawn]
    return list(zip(setup.prompts(prompts, seed), outputs, strict=True))


def batching(setup: Setup) -> Iterator[Row]:
    """Output tokens per second of one batch after the other, and of continuous batching.

    A static batch runs until its longest answer ends, on the same engine: the rows that were done
    before go on as padding, and only what was asked of them counts.
    """
    static, continuous = [], []
    for seed in range(setup.repeats):
        asked = workload(setup, seed)
        wanted = sum(length for _, length in asked)
        padded, seconds = run_static(setup, asked)
        static.append(wanted / seconds)
        answers, seconds = run_all(setup, asked)
        continuous.append(wanted / seconds)
        insist(answers == padded, "continuous batching changes an answer")
    ratio = statistics.median(a / b for a, b in zip(continuous, static, strict=True))
    n, batch = setup.repeats, setup.sizes.batch
    name, against = setup.name("continuous batching"), f"static batches of {batch}"
    yield row(name, statistics.median(continuous), "tok/s", n, ratio, against)
    yield row(setup.name("static batching"), statistics.median(static), "tok/s", n)


def run_static(setup: Setup, asked: Sequence[Ask]) -> tuple[list[list[int]], float]:
    """Answers, each cut to its length, and the seconds of all batches."""
    batch = setup.sizes.batch
    session = setup.session(max_num_seqs=batch)
    seconds = 0.0
    for begin in range(0, len(asked), batch):
        together = asked[begin : begin + batch]
        longest = max(length for _, length in together)
        for prompt, _ in together:
            session.ask(prompt, longest)
        seconds += session.finish()
    pairs = zip(session.traces, asked, strict=True)
    return [trace.token_ids[:length] for trace, (_, length) in pairs], seconds


def run_all(setup: Setup, asked: Sequence[Ask]) -> tuple[list[list[int]], float]:
    """Answers and seconds when the scheduler gets everything at once."""
    session = setup.session(max_num_seqs=setup.sizes.batch)
    for prompt, length in asked:
        session.ask(prompt, length)
    seconds = session.finish()
    return [trace.token_ids for trace in session.traces], seconds


@dataclass(slots=True)
class Slots:
    """Token slots over the steps of a run: held in blocks, filled with a token, and sequences."""

    held: int = 0
    filled: int = 0
    sequences: int = 0
    tokens: int = 0

    def note(self, engine: Engine) -> None:
        """Count what the block tables hold now. A block that several share counts once; of a
        block that is held both open and sealed, one copy counts as empty.
        """
        size, filled = engine.config.kv.block_size, dict[tuple[int, int, int], int]()
        for request in engine.scheduler.running:
            table = engine.blocks.tables.get(request.sequence_id)
            if table is None:
                continue
            computed = request.num_computed_tokens
            self.sequences += 1
            self.tokens += computed
            for group, columns in enumerate(zip(*table.ids(), strict=True)):
                for at, pair in enumerate(zip(*columns, strict=True)):
                    copies = [(group, pool, block) for pool, block in enumerate(pair) if block >= 0]
                    for copy in copies:
                        filled.setdefault(copy, 0)
                    if copies:
                        tokens = min(size, computed - at * size)
                        filled[copies[-1]] = max(filled[copies[-1]], tokens)
        self.held += size * len(filled)
        self.filled += sum(filled.values())


def waste(setup: Setup) -> Iterator[Row]:
    """Share of the slots in held blocks that hold no token, over the steps of a run."""
    slots, session = Slots(), setup.session(max_num_seqs=setup.sizes.batch)
    for prompt, length in workload(setup, seed=0):
        session.ask(prompt, length)
    session.finish(lambda: slots.note(session.engine))
    wasted, mean = 1 - slots.filled / slots.held, slots.tokens / slots.sequences
    bound = session.engine.config.kv.block_size / (2 * mean) + 0.01
    against = f"block_size / (2 × {mean:.0f} tokens) + 1 % = {bound:.1%}"
    yield row(setup.name("KV slots wasted"), wasted, "share", 1, wasted / bound, against)


def concurrency(setup: Setup) -> Iterator[Row]:
    """Sequences at a time while others wait, paged and with max_model_len reserved for each."""
    sizes, asked = setup.sizes, workload(setup, seed=0)
    blocks = sizes.reserved * -(-sizes.max_model_len // 64)
    found, answers = [], []
    for limit in (sizes.reserved, sizes.requests):
        session = setup.session(
            "bf16", num_kv_blocks=blocks, max_num_seqs=limit, max_model_len=sizes.max_model_len
        )
        for prompt, length in asked:
            session.ask(prompt, length)
        found.append(_mean_running(session))
        answers.append([trace.token_ids for trace in session.traces])
    insist(answers[0] == answers[1], "paging changes an answer")
    reserved, paged = found
    name = setup.name("sequences at a time, paged", "bf16")
    against = f"{sizes.max_model_len:,} tokens reserved for each"
    yield row(name, paged, "sequences", 1, paged / reserved, against)
    name = setup.name("sequences at a time, reserved", "bf16")
    yield row(name, reserved, "sequences", 1)


def _mean_running(session: Session) -> float:
    """Mean over the steps after which somebody waits: the memory was full."""
    running: list[int] = []
    engine, ended = session.engine, 0

    def note() -> None:
        nonlocal ended
        before, ended = ended, sum(engine.stats().finished.values())
        if engine.scheduler.num_waiting:
            running.append(len(engine.scheduler.running) + ended - before)

    session.finish(note)
    return statistics.fmean(running)
