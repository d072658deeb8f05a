"""Block tables as the scheduler would write them, so that executors are tested without it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qdeploy.kv.groups import KVGroup, KVPoolSize
from qdeploy.runtime.batch import SequenceSlice, StepBatch
from qdeploy.runtime.executors.base import Executor


class FreeIds:
    """Ids of one group, in an order that no test may rely on: those given back last come first."""

    def __init__(self, group: KVGroup, num_open: int, num_sealed: int) -> None:
        self.group = group
        self._open, self._sealed = list(range(num_open)), list(range(num_sealed))

    def take_open(self) -> int:
        return self._open.pop()

    def give_open(self, block: int) -> None:
        self._open.append(block)

    def take_sealed(self) -> int:
        return self._sealed.pop()

    def give_sealed(self, block: int) -> None:
        self._sealed.append(block)


class GroupTables:
    """Ids of both pools of one group, by the position rule, the window and nothing else.

    A block has an open id while a query of a later step can read it open (or while it fills), and
    a sealed id from the step in which it fills, if any query will ever read it sealed.
    """

    def __init__(self, pool: FreeIds) -> None:
        self.group, self.config, self.pool = pool.group, pool.group.config, pool
        self.open: dict[int, int] = {}
        self.sealed: dict[int, int] = {}

    def step(self, start: int, end: int) -> tuple[list[int], list[int]]:
        """Open and sealed ids of a slice from `start` to `end`."""
        self._free_unread(start)
        size, count = self.config.block_size, -(-end // self.config.block_size)
        for block in range(start // size, count):
            full = (block + 1) * size <= end
            scratch = full and self.config.reads_sealed(block, end // size)
            if block not in self.open and not scratch:
                self.open[block] = self.pool.take_open()
            if full and self.config.seals and block >= self.config.sink_blocks:
                self.sealed[block] = self.pool.take_sealed()
        tables = self.open, self.sealed
        opened, sealed = ([ids.get(b, -1) for b in range(count)] for ids in tables)
        return opened, sealed

    def _free_unread(self, start: int) -> None:
        """Give back the blocks that queries from `start` on don't read so."""
        oldest = self.group.first_block(start)
        for block in list(self.open):
            if block < oldest or self.config.reads_sealed(block, start // self.config.block_size):
                self.pool.give_open(self.open.pop(block))
        for block in [b for b in self.sealed if b < oldest]:
            self.pool.give_sealed(self.sealed.pop(block))


class SequenceTables:
    """Hands out ids of all groups to one sequence."""

    def __init__(self, pools: Sequence[FreeIds]) -> None:
        self.groups = [GroupTables(pool) for pool in pools]

    def slice(self, tokens: Sequence[int], start: int, num_logits: int) -> SequenceSlice:
        """The slice of `tokens` at position `start`, with ids for what it writes."""
        ids = [group.step(start, start + len(tokens)) for group in self.groups]
        return SequenceSlice(
            token_ids=list(tokens),
            start=start,
            open_blocks=[opened for opened, _ in ids],
            sealed_blocks=[sealed for _, sealed in ids],
            num_logits=num_logits,
        )

    def share_prefix(self, other: SequenceTables, num_blocks: int) -> None:
        """A prefix hit: reuse the other's first blocks, sealed and open."""
        for mine, theirs in zip(self.groups, other.groups, strict=True):
            for block in range(num_blocks):
                if block in theirs.sealed:
                    mine.sealed[block] = theirs.sealed[block]
                if block in theirs.open:
                    mine.open[block] = theirs.open[block]


def pool_sizes(executor: Executor, num_open: int, num_sealed: int) -> list[KVPoolSize]:
    """The same sizes for every group."""
    size = KVPoolSize(num_open_blocks=num_open, num_sealed_blocks=num_sealed)
    return [size] * len(executor.kv_groups)


def run_chunks(
    executor: Executor,
    tokens: Sequence[int],
    bounds: Sequence[int],
    pools: Sequence[FreeIds] | None = None,
) -> Tensor:
    """Logits [len(tokens), vocab] of one sequence, computed in chunks that end at `bounds`."""
    if pools is None:
        pools = fresh_pools(executor, -(-len(tokens) // executor.kv_config.block_size) + 1)
    tables = SequenceTables(pools)
    starts = [0, *bounds[:-1]]
    return torch.cat(
        [
            executor.execute(StepBatch([tables.slice(tokens[a:b], a, num_logits=b - a)]))
            for a, b in zip(starts, bounds, strict=True)
        ]
    )


def fresh_pools(executor: Executor, num_blocks: int = 64) -> list[FreeIds]:
    """Allocate pools in which no place holds what a test expects to be written there.

    The reference executor's hold NaN, the other's the K/V of a sequence of their own.
    """
    executor.allocate_kv(pool_sizes(executor, num_blocks, num_blocks))
    if executor.name == "reference":
        for pools in executor._pools:  # type: ignore[attr-defined]
            pools.open.fill_(float("nan"))
            pools.sealed.fill_(255)  # float16 NaN as scale
    else:
        _use_every_block(executor, num_blocks)
    return [FreeIds(group, num_blocks, num_blocks) for group in executor.kv_groups]


def _use_every_block(executor: Executor, num_blocks: int) -> None:
    """A step that writes every id of all pools, by sequences of a few blocks."""
    groups = executor.kv_groups
    pieces = []
    for first in range(0, num_blocks, 6):
        ids = range(first, min(first + 6, num_blocks))
        piece = SequenceSlice(
            token_ids=[t % 7 for t in range(len(ids) * executor.kv_config.block_size)],
            start=0,
            open_blocks=[ids] * len(groups),
            sealed_blocks=[ids if g.config.seals else [-1] * len(ids) for g in groups],
            num_logits=0,
        )
        pieces.append(piece)
    executor.execute(StepBatch(pieces))
