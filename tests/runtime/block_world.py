"""A dictionary model of the KV pools: what stands in every block, and what a step reads.

An entry is (salt, tokens up to and including its position), since K/V depend on all of them. So a
block of another prefix, a stale block and a block read by the wrong rule are all seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from qdeploy.kv.groups import KVGroup
from qdeploy.runtime.batch import BlockCopy, BlockIds
from qdeploy.runtime.block_manager import BlockManager
from qdeploy.runtime.prefix_cache import PrefixNode

Entry = tuple[str, tuple[int, ...]]
Block = list[Entry | None]


@dataclass(eq=False)
class Sequence_:
    """tokens: all known ones; computed: how many of them are in the cache; end: of the step that
    is under way, whose tokens from certain on are drafts.
    """

    name: str
    tokens: list[int]
    salt: str
    computed: int = 0
    end: int = 0
    certain: int = 0
    drafts: list[int] = field(default_factory=list)

    def entry(self, position: int) -> Entry:
        return self.salt, tuple((self.tokens + self.drafts)[: position + 1])


class BlockWorld:
    """Contents per column and block."""

    def __init__(self, blocks: BlockManager) -> None:
        self.blocks, self.size = blocks, blocks.block_size
        self.contents: list[list[Block]] = [
            [[None] * self.size for _ in range(pool.size)] for pool in blocks.pools
        ]

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        for copy in copies:
            column = self.contents[2 * copy.group]
            column[copy.target] = list(column[copy.source])

    def read(self, ids: Sequence[BlockIds]) -> list[list[Block]]:
        return [
            [list(self.contents[2 * g + kind][i]) for i in row]
            for g, part in enumerate(ids)
            for kind, row in enumerate((part.open, part.sealed))
        ]

    def write(
        self, ids: Sequence[BlockIds], rows: Sequence[Sequence[int]], saved: list[list[Block]]
    ) -> None:
        for g, part in enumerate(ids):
            for kind, column in enumerate((part.open, part.sealed)):
                index = 2 * g + kind
                for block, row in zip(column, rows[index], strict=True):
                    self.contents[index][block] = list(saved[index][row])

    def run(self, seq: Sequence_) -> None:
        """Compute a slice, group by group: every query reads what the rule says, and finds it."""
        open_ids, sealed_ids = self.blocks.tables[seq.name].ids()
        for index, group in enumerate(self.blocks.groups):
            for position in range(seq.computed, seq.end):
                self._write(index, open_ids[index], sealed_ids[index], seq, position)
                self._query(index, group, open_ids[index], sealed_ids[index], seq, position)

    def _write(
        self, g: int, opened: Sequence[int], sealed: Sequence[int], seq: Sequence_, position: int
    ) -> None:
        block, offset = divmod(position, self.size)
        if opened[block] >= 0:
            assert self.blocks.pools[2 * g].ref_counts[opened[block]] == 1, "a shared block written"
            self.contents[2 * g][opened[block]][offset] = seq.entry(position)
        if sealed[block] >= 0 and offset == self.size - 1:
            start = block * self.size
            if opened[block] >= 0:
                full = list(self.contents[2 * g][opened[block]])
            else:
                assert seq.computed <= start, "an open block is missing"
                full = [seq.entry(p) for p in range(start, start + self.size)]
            self.contents[2 * g + 1][sealed[block]] = full

    def _query(
        self,
        g: int,
        group: KVGroup,
        opened: Sequence[int],
        sealed: Sequence[int],
        seq: Sequence_,
        position: int,
    ) -> None:
        low = max(0, position - group.window + 1) if group.window else 0
        for p in range(low, position + 1):
            block, offset = divmod(p, self.size)
            if group.config.reads_sealed(block, position // self.size):
                assert sealed[block] >= 0, "a sealed block is missing"
                found = self.contents[2 * g + 1][sealed[block]][offset]
            elif opened[block] >= 0:
                found = self.contents[2 * g][opened[block]][offset]
            else:
                assert seq.computed <= block * self.size, "an open block is missing"
                continue
            assert found == seq.entry(p), f"position {position} reads wrong K/V at {p}"

    def check_table(self, seq: Sequence_) -> None:
        """Whatever a sequence at rest holds is right, as far as it is computed."""
        for index, column in enumerate(self.blocks.tables[seq.name].columns):
            for block, block_id in enumerate(column):
                if block_id >= 0:
                    for p in range(block * self.size, min((block + 1) * self.size, seq.computed)):
                        found = self.contents[index][block_id][p % self.size]
                        assert found == seq.entry(p), "a table holds a wrong block"

    def check_cache(self, node: PrefixNode, salt: str, prefix: tuple[int, ...] = ()) -> None:
        """Whatever can be found is what it is found as."""
        for index, block_id in enumerate(node.ids):
            if block_id >= 0:
                start = len(prefix) - self.size
                expected = [(salt, prefix[: start + i + 1]) for i in range(self.size)]
                assert self.contents[index][block_id] == expected, "the cache is wrong"
        for key, child in node.children.items():
            assert isinstance(key, tuple)
            self.check_cache(child, salt, prefix + key)
