"""Block tables as the scheduler would write them, so that executors are tested without it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qdeploy.kv.config import KVCacheConfig
from qdeploy.runtime.batch import SequenceSlice, StepBatch
from qdeploy.runtime.executors.base import Executor


class SequenceTables:
    """Hands out ids of both pools to one sequence, by the position rule and nothing else.

    A block has an open id while a query of a later step can read it open (or while it fills), and
    a sealed id from the step in which it fills, if any query will ever read it sealed.
    """

    def __init__(self, config: KVCacheConfig, pool: FreeIds) -> None:
        self.config, self.pool = config, pool
        self.open: dict[int, int] = {}
        self.sealed: dict[int, int] = {}

    def slice(self, tokens: Sequence[int], start: int, num_logits: int) -> SequenceSlice:
        """The slice of `tokens` at position `start`, with ids for what it writes."""
        self._free_unread(start)
        size, end = self.config.block_size, start + len(tokens)
        count = -(-end // size)
        for block in range(start // size, count):
            full = (block + 1) * size <= end
            scratch = full and self.config.reads_sealed(block, end // size)
            if block not in self.open and not scratch:
                self.open[block] = self.pool.take_open()
            if full and self.config.seals and block >= self.config.sink_blocks:
                self.sealed[block] = self.pool.take_sealed()
        return SequenceSlice(
            token_ids=list(tokens),
            start=start,
            open_blocks=[self.open.get(b, -1) for b in range(count)],
            sealed_blocks=[self.sealed.get(b, -1) for b in range(count)],
            num_logits=num_logits,
        )

    def _free_unread(self, start: int) -> None:
        """Give back the open blocks that queries from `start` on don't read open."""
        for block in list(self.open):
            if self.config.reads_sealed(block, start // self.config.block_size):
                self.pool.give_open(self.open.pop(block))

    def share_prefix(self, other: SequenceTables, num_blocks: int) -> None:
        """A prefix hit: reuse the other's first blocks, sealed and open."""
        for block in range(num_blocks):
            if block in other.sealed:
                self.sealed[block] = other.sealed[block]
            if block in other.open:
                self.open[block] = other.open[block]


class FreeIds:
    """Ids in an order that no test may rely on: the ones given back last come first."""

    def __init__(self, num_open: int, num_sealed: int) -> None:
        self._open, self._sealed = list(range(num_open)), list(range(num_sealed))

    def take_open(self) -> int:
        return self._open.pop()

    def give_open(self, block: int) -> None:
        self._open.append(block)

    def take_sealed(self) -> int:
        return self._sealed.pop()


def run_chunks(
    executor: Executor, tokens: Sequence[int], bounds: Sequence[int], pool: FreeIds | None = None
) -> Tensor:
    """Logits [len(tokens), vocab] of one sequence, computed in chunks that end at `bounds`."""
    if pool is None:
        pool = fresh_pools(executor, -(-len(tokens) // executor.kv_config.block_size) + 1)
    tables = SequenceTables(executor.kv_config, pool)
    starts = [0, *bounds[:-1]]
    return torch.cat(
        [
            executor.execute(StepBatch([tables.slice(tokens[a:b], a, num_logits=b - a)]))
            for a, b in zip(starts, bounds, strict=True)
        ]
    )


def fresh_pools(executor: Executor, num_blocks: int = 64) -> FreeIds:
    """Allocate pools in which no place holds what a test expects to be written there.

    The reference executor's hold NaN, the other's the K/V of a sequence of their own.
    """
    executor.allocate_kv(num_blocks, num_blocks)
    if executor.name == "reference":
        pools = executor._pools  # type: ignore[attr-defined]
        pools.open.fill_(float("nan"))
        pools.sealed.fill_(255)  # float16 NaN as scale
    else:
        _use_every_block(executor, num_blocks)
    return FreeIds(num_blocks, num_blocks)


def _use_every_block(executor: Executor, num_blocks: int) -> None:
    """A step that writes every id of both pools, by sequences of a few blocks."""
    config = executor.kv_config
    pieces = []
    for first in range(0, num_blocks, 6):
        ids = range(first, min(first + 6, num_blocks))
        piece = SequenceSlice(
            token_ids=[t % 7 for t in range(len(ids) * config.block_size)],
            start=0,
            open_blocks=ids,
            sealed_blocks=ids if config.seals else [-1] * len(ids),
            num_logits=0,
        )
        pieces.append(piece)
    executor.execute(StepBatch(pieces))
