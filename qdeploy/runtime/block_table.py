"""The columns of a sequence's block table, and which blocks each of them must hold.

A table has two columns per KV group: open blocks, then sealed ones. The position rule (DESIGN §5,
KVCacheConfig.reads_sealed): a query in block q reads block b sealed iff b ≥ sink_blocks and
b < q − residual_blocks. So once `end` tokens are computed, every later query stands in a block
≥ end // block_size, and b must stay open iff b < sink_blocks or
b ≥ end // block_size − residual_blocks. Blocks before `KVGroup.first_block(end)` have left the
window, and nobody reads them any more. Everything else follows from that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from qdeploy.kv.groups import KVGroup
from qdeploy.runtime.batch import BlockCopy

if TYPE_CHECKING:
    from qdeploy.runtime.prefix_cache import PrefixNode

NO_BLOCK = -1
Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Column:
    """The open or the sealed blocks of one group. Ranges are of logical blocks, [low, high)."""

    index: int  # of the group
    group: KVGroup
    sealed: bool

    def held(self, num_tokens: int) -> tuple[Range, ...]:
        """What a sequence of num_tokens computed tokens holds; a range may be empty. The low ends
        never fall as num_tokens grows.
        """
        kv, first = self.group.config, self.group.first_block(num_tokens)
        full = num_tokens // kv.block_size
        num_blocks = -(-num_tokens // kv.block_size)
        if self.sealed:
            return ((max(first, kv.sink_blocks), full if kv.seals else 0),)
        if not kv.seals:
            return ((first, num_blocks),)
        recent = max(first, kv.sink_blocks, full - kv.residual_blocks)
        return (first, min(kv.sink_blocks, num_blocks)), (recent, num_blocks)

    def needs(self, block: int, end: int, certain_end: int) -> bool:
        """Whether a step up to `end`, of which certain_end tokens will surely be kept, needs an
        id for a block that it writes. Without an open one the block's K/V are step scratch.
        """
        kv = self.group.config
        if self.sealed:
            fills = (block + 1) * kv.block_size <= end
            return kv.seals and fills and block >= kv.sink_blocks
        return not kv.reads_sealed(block, certain_end // kv.block_size)

    def reusable(self, block: int) -> bool:
        """Whether another sequence with the same prefix could ever need this block from here."""
        kv = self.group.config
        return self.sealed or not kv.seals or block < kv.sink_blocks or kv.residual_blocks > 0


def columns_of(groups: Sequence[KVGroup]) -> tuple[Column, ...]:
    """Group by group: open, then sealed."""
    return tuple(
        Column(index, group, sealed)
        for index, group in enumerate(groups)
        for sealed in (False, True)
    )


Ids = tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class BlockTable:
    """Pool ids per column and logical block of one sequence, −1 where there is none.

    num_tokens: computed and committed; allocated: the end of the step under way.
    tail_is_shared: a fork may hold the last, partial block, too. copies: that the next step must
    make. node: the last full block in the prefix cache, None before the first one.
    """

    columns: list[list[int]]
    num_tokens: int = 0
    allocated: int = 0
    tail_is_shared: bool = False
    copies: list[BlockCopy] = field(default_factory=list)
    node: PrefixNode | None = None
    _ids: tuple[Ids, Ids] | None = None

    @property
    def num_blocks(self) -> int:
        """Logical blocks, the released ones included."""
        return len(self.columns[0])

    def ids(self) -> tuple[Ids, Ids]:
        """(open, sealed) ids per group; the same objects again until the table changes."""
        if self._ids is None:
            rows = [tuple(column) for column in self.columns]
            self._ids = tuple(rows[0::2]), tuple(rows[1::2])
        return self._ids

    def changed(self) -> None:
        """Call after changing a block's id."""
        self._ids = None

    def resize(self, num_blocks: int) -> None:
        """Grow with −1, or cut; whoever cuts has released those ids."""
        for column in self.columns:
            del column[num_blocks:]
            column.extend([NO_BLOCK] * (num_blocks - len(column)))
