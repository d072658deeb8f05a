"""Who holds which KV block. Knows nothing of tensors: ids, tables and counts only.

The position rule (DESIGN §5, KVCacheConfig.reads_sealed): a query in block q reads block b sealed
iff b ≥ sink_blocks and b < q − residual_blocks. So once `end` tokens are computed, every later
query stands in a block ≥ end // block_size, and b must stay open iff
b < sink_blocks or b ≥ end // block_size − residual_blocks. Everything below follows from that.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from qdeploy.kv.config import KVCacheConfig
from qdeploy.runtime.block_pool import BlockPool

NO_BLOCK = -1


@dataclass(slots=True)
class BlockTable:
    """Pool ids per logical block of one sequence, −1 where there is none."""

    open_blocks: list[int] = field(default_factory=list)
    sealed_blocks: list[int] = field(default_factory=list)
    num_tokens: int = 0  # computed and committed
    _ids: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def ids(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(open, sealed) ids; the same objects again until the table changes."""
        if self._ids is None:
            self._ids = tuple(self.open_blocks), tuple(self.sealed_blocks)
        return self._ids

    def changed(self) -> None:
        """Call after changing a block's id."""
        self._ids = None


class BlockManager:
    """Two pools of blocks, open and sealed, and one table per sequence.

    A step over positions [num_tokens, end) is bracketed by `allocate(id, end)` and
    `commit(id, end)`; in between, the table holds every block that the step reads or writes.
    """

    def __init__(
        self, config: KVCacheConfig, *, num_open_blocks: int, num_sealed_blocks: int
    ) -> None:
        self.config = config
        self.open_pool = BlockPool("open", num_open_blocks)
        self.sealed_pool = BlockPool("sealed", num_sealed_blocks)
        self.tables: dict[str, BlockTable] = {}

    def stays_open(self, block: int, end: int) -> bool:
        """Whether a query at a position ≥ end may read `block` open."""
        query_block = end // self.config.block_size
        return not self.config.reads_sealed(block, query_block)

    def allocate(self, sequence_id: str, end: int) -> bool:
        """Grow the table for a step up to `end`; all or nothing, False when blocks lack."""
        table = self.tables.get(sequence_id)
        if table is None:
            table = BlockTable()
        elif self._in_open_tail(table, end):
            return True
        to_open, to_seal = self._missing(table, end)
        if len(to_open) > self.open_pool.num_free or len(to_seal) > self.sealed_pool.num_free:
            return False
        self.tables[sequence_id] = table
        table.changed()
        grow = self._num_blocks(end) - len(table.open_blocks)
        table.open_blocks.extend([NO_BLOCK] * grow)
        table.sealed_blocks.extend([NO_BLOCK] * grow)
        for block in to_open:
            table.open_blocks[block] = self.open_pool.take()
        for block in to_seal:
            table.sealed_blocks[block] = self.sealed_pool.take()
        return True

    def commit(self, sequence_id: str, end: int) -> None:
        """The step up to `end` is done: release open blocks that no later query reads open."""
        table = self.tables[sequence_id]
        if self._in_open_tail(table, end):
            table.num_tokens = end
            return
        table.changed()
        for block in range(self._first_live(table.num_tokens), self._num_blocks(end)):
            if table.open_blocks[block] != NO_BLOCK and not self.stays_open(block, end):
                self.open_pool.release(table.open_blocks[block])
                table.open_blocks[block] = NO_BLOCK
        table.num_tokens = end

    def free(self, sequence_id: str) -> None:
        """Release everything that the sequence holds; nothing if it holds nothing."""
        table = self.tables.pop(sequence_id, None)
        if table is None:
            return
        for block in reversed(table.open_blocks):
            if block != NO_BLOCK:
                self.open_pool.release(block)
        for block in reversed(table.sealed_blocks):
            if block != NO_BLOCK:
                self.sealed_pool.release(block)

    def blocks_for(self, num_tokens: int) -> tuple[int, int]:
        """(open, sealed) blocks that let one sequence grow token by token to num_tokens."""
        return blocks_for_tokens(self.config, num_tokens)

    def fits_alone(self, num_tokens: int) -> bool:
        """Whether a sequence of num_tokens could run with both pools to itself."""
        num_open, num_sealed = self.blocks_for(num_tokens)
        return num_open <= self.open_pool.size and num_sealed <= self.sealed_pool.size

    def check_integrity(self) -> None:
        """Raise AssertionError when tables, reference counts and free lists disagree."""
        tables = self.tables.values()
        self.open_pool.check_integrity([b for t in tables for b in t.open_blocks if b >= 0])
        self.sealed_pool.check_integrity([b for t in tables for b in t.sealed_blocks if b >= 0])

    def _missing(self, table: BlockTable, end: int) -> tuple[list[int], list[int]]:
        """Logical blocks that need a new open id, and a new sealed id, for a step up to end."""
        size, config = self.config.block_size, self.config
        to_open, to_seal = [], []
        for block in range(table.num_tokens // size, self._num_blocks(end)):
            known = block < len(table.open_blocks)
            if self.stays_open(block, end) and not (known and table.open_blocks[block] >= 0):
                to_open.append(block)
            fills = config.seals and block >= config.sink_blocks and (block + 1) * size <= end
            if fills and not (known and table.sealed_blocks[block] >= 0):
                to_seal.append(block)
        return to_open, to_seal

    def _in_open_tail(self, table: BlockTable, end: int) -> bool:
        """Whether a step up to `end` begins and ends inside the last block, which is open then:
        nothing to take, to seal or to release. Most decode steps are such.
        """
        size = self.config.block_size
        return table.num_tokens % size > 0 and end // size == table.num_tokens // size

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.block_size)

    def _first_live(self, num_tokens: int) -> int:
        """The first block past the sinks that may be open after num_tokens."""
        oldest = num_tokens // self.config.block_size - self.config.residual_blocks
        return max(self.config.sink_blocks, oldest)


def blocks_for_tokens(config: KVCacheConfig, num_tokens: int) -> tuple[int, int]:
    """(open, sealed) blocks that one sequence needs to grow to num_tokens, block by block.

    Open: sinks, the residual and the tail. A prompt chunk that spans blocks may hold up to
    residual_blocks + 1 more until the step is done; the scheduler then ends it at a block's end.
    """
    num_blocks = -(-num_tokens // config.block_size)
    if not config.seals:
        return num_blocks, 0
    num_open = min(num_blocks, config.sink_blocks + config.residual_blocks + 1)
    return num_open, max(0, num_tokens // config.block_size - config.sink_blocks)
