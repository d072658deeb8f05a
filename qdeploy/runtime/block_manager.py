"""Who holds which KV block. Knows nothing of tensors: ids, tables and counts only.

The position rule (DESIGN §5, KVCacheConfig.reads_sealed): a query in block q reads block b sealed
iff b ≥ sink_blocks and b < q − residual_blocks. So once `end` tokens are computed, every later
query stands in a block ≥ end // block_size, and b must stay open iff
b < sink_blocks or b ≥ end // block_size − residual_blocks. Everything below follows from that, and
from windows: blocks before KVGroup.first_block(end) aren't read any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from qdeploy.kv.groups import KVGroup, KVPoolSize
from qdeploy.runtime.block_pool import BlockPool

NO_BLOCK = -1
Ids = tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class GroupTable:
    """Pool ids per logical block of one sequence in one group, −1 where there is none."""

    open_blocks: list[int] = field(default_factory=list)
    sealed_blocks: list[int] = field(default_factory=list)


@dataclass(slots=True)
class BlockTable:
    """A sequence's tables, one for each group."""

    groups: tuple[GroupTable, ...]
    num_tokens: int = 0  # computed and committed
    _ids: tuple[Ids, Ids] | None = None

    def ids(self) -> tuple[Ids, Ids]:
        """(open, sealed) ids per group; the same objects again until the table changes."""
        if self._ids is None:
            self._ids = (
                tuple(tuple(group.open_blocks) for group in self.groups),
                tuple(tuple(group.sealed_blocks) for group in self.groups),
            )
        return self._ids

    def changed(self) -> None:
        """Call after changing a block's id."""
        self._ids = None


class GroupBlocks:
    """The two pools of one group, and what a step takes from them and gives back."""

    def __init__(self, group: KVGroup, size: KVPoolSize) -> None:
        self.group, self.config = group, group.config
        self.open_pool = BlockPool("open", size.num_open_blocks)
        self.sealed_pool = BlockPool("sealed", size.num_sealed_blocks)

    def missing(self, table: GroupTable, start: int, end: int) -> tuple[list[int], list[int]]:
        """Logical blocks that need a new open id, and a new sealed id, for a step up to end."""
        size, config = self.config.block_size, self.config
        to_open, to_seal = [], []
        for block in range(start // size, -(-end // size)):
            known = block < len(table.open_blocks)
            held = known and table.open_blocks[block] >= 0
            if not held and not config.reads_sealed(block, end // size):
                to_open.append(block)
            fills = config.seals and block >= config.sink_blocks and (block + 1) * size <= end
            if fills and not (known and table.sealed_blocks[block] >= 0):
                to_seal.append(block)
        return to_open, to_seal

    def have(self, missing: tuple[list[int], list[int]]) -> bool:
        """Whether that many blocks are free."""
        to_open, to_seal = missing
        return len(to_open) <= self.open_pool.num_free and len(to_seal) <= self.sealed_pool.num_free

    def grow(self, table: GroupTable, missing: tuple[list[int], list[int]], end: int) -> None:
        """Take the missing blocks."""
        more = -(-end // self.config.block_size) - len(table.open_blocks)
        table.open_blocks.extend([NO_BLOCK] * more)
        table.sealed_blocks.extend([NO_BLOCK] * more)
        for block in missing[0]:
            table.open_blocks[block] = self.open_pool.take()
        for block in missing[1]:
            table.sealed_blocks[block] = self.sealed_pool.take()

    def shrink(self, table: GroupTable, start: int, end: int) -> None:
        """Release what no query from `end` on reads; until now they began at `start`."""
        size, config, group = self.config.block_size, self.config, self.group
        left = range(group.first_block(start), group.first_block(end))
        oldest = max(config.sink_blocks, start // size - config.residual_blocks)
        sealed = [
            block
            for block in range(oldest, -(-end // size))
            if config.reads_sealed(block, end // size)
        ]
        for block in [*left, *sealed]:
            self._release(self.open_pool, table.open_blocks, block)
        for block in left:
            self._release(self.sealed_pool, table.sealed_blocks, block)

    def free(self, table: GroupTable) -> None:
        """Release everything."""
        for block in reversed(range(len(table.open_blocks))):
            self._release(self.open_pool, table.open_blocks, block)
            self._release(self.sealed_pool, table.sealed_blocks, block)

    def check_integrity(self, tables: Sequence[GroupTable]) -> None:
        """Raise AssertionError when tables, reference counts and free lists disagree."""
        self.open_pool.check_integrity([b for t in tables for b in t.open_blocks if b >= 0])
        self.sealed_pool.check_integrity([b for t in tables for b in t.sealed_blocks if b >= 0])

    @staticmethod
    def _release(pool: BlockPool, ids: list[int], block: int) -> None:
        if ids[block] != NO_BLOCK:
            pool.release(ids[block])
            ids[block] = NO_BLOCK


class BlockManager:
    """Two pools of blocks for each KV group, and one table per sequence.

    A step over positions [num_tokens, end) is bracketed by `allocate(id, end)` and
    `commit(id, end)`; in between, the table holds every block that the step reads or writes.
    """

    def __init__(self, groups: Sequence[KVGroup], pools: Sequence[KVPoolSize]) -> None:
        self.groups = [GroupBlocks(g, size) for g, size in zip(groups, pools, strict=True)]
        self.windowed = [blocks for blocks in self.groups if blocks.group.window]
        self.block_size = groups[0].config.block_size
        self.tables: dict[str, BlockTable] = {}

    def allocate(self, sequence_id: str, end: int) -> bool:
        """Grow the table for a step up to `end`; all or nothing, False when blocks lack."""
        table = self.tables.get(sequence_id)
        if table is None:
            table = BlockTable(tuple(GroupTable() for _ in self.groups))
        elif self._in_open_tail(table, end):
            return True
        start = table.num_tokens
        pairs = list(zip(self.groups, table.groups, strict=True))
        missing = [blocks.missing(part, start, end) for blocks, part in pairs]
        if not all(b.have(m) for b, m in zip(self.groups, missing, strict=True)):
            return False
        self.tables[sequence_id] = table
        table.changed()
        for (blocks, part), lacking in zip(pairs, missing, strict=True):
            blocks.grow(part, lacking, end)
        return True

    def commit(self, sequence_id: str, end: int) -> None:
        """The step up to `end` is done: release blocks that no later query reads."""
        table = self.tables[sequence_id]
        start = table.num_tokens
        left = any(b.group.first_block(start) < b.group.first_block(end) for b in self.windowed)
        if left or not self._in_open_tail(table, end):
            table.changed()
            for blocks, part in zip(self.groups, table.groups, strict=True):
                blocks.shrink(part, start, end)
        table.num_tokens = end

    def free(self, sequence_id: str) -> None:
        """Release everything that the sequence holds; nothing if it holds nothing."""
        table = self.tables.pop(sequence_id, None)
        if table is not None:
            for blocks, part in zip(self.groups, table.groups, strict=True):
                blocks.free(part)

    def fits_alone(self, num_tokens: int) -> bool:
        """Whether a sequence of num_tokens could run with all pools to itself."""
        needs = [b.group.blocks_for_tokens(num_tokens) for b in self.groups]
        return all(
            num_open <= blocks.open_pool.size and num_sealed <= blocks.sealed_pool.size
            for blocks, (num_open, num_sealed) in zip(self.groups, needs, strict=True)
        )

    def fit_now(self, lengths: Sequence[int]) -> bool:
        """Whether free blocks hold sequences of so many tokens."""
        for blocks in self.groups:
            needs = [blocks.group.blocks_for_tokens(length) for length in lengths]
            if sum(num_open for num_open, _ in needs) > blocks.open_pool.num_free:
                return False
            if sum(num_sealed for _, num_sealed in needs) > blocks.sealed_pool.num_free:
                return False
        return True

    def check_integrity(self) -> None:
        """Raise AssertionError when tables, reference counts and free lists disagree."""
        for index, blocks in enumerate(self.groups):
            blocks.check_integrity([table.groups[index] for table in self.tables.values()])

    def _in_open_tail(self, table: BlockTable, end: int) -> bool:
        """Whether a step up to `end` begins and ends inside the last block, which is open then:
        nothing to take or to seal. Most decode steps are such.
        """
        size = self.block_size
        return table.num_tokens % size > 0 and end // size == table.num_tokens // size
