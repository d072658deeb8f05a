"""Who holds which KV block. Knows nothing of tensors: ids, tables and counts only.

Block ids live in two pools per KV group, open and sealed; a sequence's table has a column for each
(block_table.Column says which blocks it must hold when). Full blocks can be shared: between the
samples of a request, which fork their prompt's table, and between requests, through the prefix
cache. A partial block is never shared between requests; samples copy it before they write.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from qdeploy.kv.groups import KVGroup, KVPoolSize
from qdeploy.runtime.batch import BlockCopy, BlockIds
from qdeploy.runtime.block_pool import BlockPool
from qdeploy.runtime.block_table import NO_BLOCK, BlockTable, columns_of
from qdeploy.runtime.prefix_cache import PrefixCache, PrefixHit, PrefixNode

Counts = tuple[int, ...]  # per column


@dataclass(frozen=True, slots=True, kw_only=True)
class SwappedTable:
    """What a sequence held when it was swapped out. blocks: per column the logical blocks."""

    num_tokens: int
    num_blocks: int
    blocks: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """ids: where a swapped sequence's bytes go. rows: per column which of the blocks that were
    saved these are; the others were still in the prefix cache.
    """

    ids: tuple[BlockIds, ...]
    rows: tuple[tuple[int, ...], ...]


class BlockManager:
    """Pools, prefix cache, and one table per sequence.

    A step over positions [num_tokens, end) is bracketed by `allocate(id, end)` and
    `commit(id, end, …)`; in between, the table holds every block that the step reads or writes.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        pools: Sequence[KVPoolSize],
        *,
        prefix_caching: bool = True,
    ) -> None:
        self.groups = tuple(groups)
        self.block_size = groups[0].config.block_size
        self.columns = columns_of(groups)
        sizes = [n for p in pools for n in (p.num_open_blocks, p.num_sealed_blocks)]
        self.prefix_caching = prefix_caching
        #: Whether a sequence that computes a prompt leaves any prefix of it to be found; with a
        #: residual, only prefixes whose last blocks are still open.
        self.caches_every_block = prefix_caching and not any(
            group.config.seals and group.config.residual_blocks for group in groups
        )
        self.cache = PrefixCache(self.columns, sizes)
        self.pools: Sequence[BlockPool] = self.cache.pools
        self.tables: dict[str, BlockTable] = {}

    # --- one step of a sequence ----------------------------------------------------------------

    def allocate(self, sequence_id: str, end: int, *, certain_end: int | None = None) -> bool:
        """Grow the table for a step up to `end`; all or nothing, False when blocks lack.

        Tokens from certain_end on (default: none) may turn out not to be kept: a block that they
        fill gets a sealed id, and keeps its open one until `commit` says what became of them.
        """
        table = self.tables.get(sequence_id)
        if table is None:
            table = self._new_table()
        elif self._in_open_tail(table, end):
            table.allocated = max(table.allocated, end)
            return True
        certain_end = end if certain_end is None else certain_end
        missing = [
            self._missing(table, index, end, certain_end) for index in range(len(self.columns))
        ]
        shared = self._shared_tail(table)
        for index, pool in enumerate(self.pools):
            if len(missing[index]) + (index in shared) > pool.num_available:
                return False
        self.tables[sequence_id] = table
        table.resize(max(table.num_blocks, self._num_blocks(end)))
        table.allocated = max(table.allocated, end)
        for index in shared:
            self._copy_tail(table, index)
        table.tail_is_shared = False
        for index, blocks in enumerate(missing):
            for block in blocks:
                table.columns[index][block] = self.pools[index].take()
        table.changed()
        return True

    def commit(
        self, sequence_id: str, end: int, token_ids: Sequence[int] = (), salt: str = ""
    ) -> None:
        """The step is done, and its tokens up to `end` are kept: publish the blocks that are full
        now, release what no later query reads.

        token_ids: at least the sequence's first `end` tokens, when prefixes are cached.
        """
        table = self.tables[sequence_id]
        table.copies.clear()
        if self._stayed_in_tail(table):
            table.num_tokens = table.allocated = end
            return
        if self.prefix_caching:
            self._publish(table, end, token_ids, salt)
        self._release_unread(table, end)
        table.num_tokens = table.allocated = end
        table.changed()

    # --- sharing -------------------------------------------------------------------------------

    def match(self, token_ids: Sequence[int], salt: str = "") -> PrefixHit:
        """What the prefix cache has of a sequence; at least one token is left to compute."""
        return self.cache.match(token_ids, salt) if self.prefix_caching else PrefixHit()

    def adopt(self, sequence_id: str, hit: PrefixHit) -> None:
        """Begin a table with a hit's blocks; it must still be current."""
        assert sequence_id not in self.tables, f"{sequence_id} has a table"
        if not hit.num_tokens:
            return
        table = self._new_table()
        table.resize(len(hit.nodes))
        for index, column in enumerate(self.columns):
            for block in _blocks(column.held(hit.num_tokens)):
                table.columns[index][block] = hit.nodes[block].ids[index]
                self.pools[index].share(hit.nodes[block].ids[index])
        table.num_tokens = table.allocated = hit.num_tokens
        table.node = self.cache.pin(hit.nodes[-1])
        self.tables[sequence_id] = table

    def fork(self, parent_id: str, child_id: str) -> None:
        """Give a new sequence everything that `parent_id` has committed; nothing is copied yet."""
        assert child_id not in self.tables, f"{child_id} has a table"
        parent = self.tables[parent_id]
        assert parent.allocated == parent.num_tokens, "a fork comes between steps"
        for pool, column in zip(self.pools, parent.columns, strict=True):
            for block in column:
                if block != NO_BLOCK:
                    pool.share(block)
        parent.tail_is_shared = parent.num_tokens % self.block_size > 0
        self.tables[child_id] = replace(
            parent,
            columns=[list(column) for column in parent.columns],
            copies=[],
            node=self.cache.pin(parent.node),
        )

    def take_copies(self, sequence_ids: Sequence[str]) -> list[BlockCopy]:
        """The copies that the step of these sequences begins with, in order."""
        return [copy for i in sequence_ids for copy in self.tables[i].copies]

    def free(self, sequence_id: str) -> None:
        """Release everything that the sequence holds; nothing if it holds nothing.

        The deepest block goes first, so that the cache loses a prefix from its end.
        """
        table = self.tables.pop(sequence_id, None)
        if table is None:
            return
        for pool, column in zip(self.pools, table.columns, strict=True):
            for block in reversed(column):
                if block != NO_BLOCK:
                    pool.release(block)
        self.cache.unpin(table.node)

    # --- swapping ------------------------------------------------------------------------------

    def swap_out(self, sequence_id: str) -> tuple[SwappedTable, tuple[BlockIds, ...]]:
        """Free a sequence's blocks. Read the ids returned before anything else is computed."""
        table = self.tables[sequence_id]
        self._release_unread(table, table.num_tokens)  # what the step under way was given
        # A copy that isn't made yet: the content is still where it comes from.
        sources = {(c.group, c.target): c.source for c in table.copies}
        blocks, ids = [], []
        for column, row in zip(self.columns, table.columns, strict=True):
            held = tuple(block for block, block_id in enumerate(row) if block_id != NO_BLOCK)
            blocks.append(held)
            moved = {} if column.sealed else sources
            ids.append(tuple(moved.get((column.index, row[b]), row[b]) for b in held))
        swapped = SwappedTable(
            num_tokens=table.num_tokens, num_blocks=table.num_blocks, blocks=tuple(blocks)
        )
        self.free(sequence_id)
        return swapped, _per_group(ids)

    def swap_in(
        self, sequence_id: str, swapped: SwappedTable, token_ids: Sequence[int], salt: str
    ) -> Restored | None:
        """Blocks for a sequence that was swapped out, None when they lack. Those that the prefix
        cache still has are shared; the others must be written before the next step.
        """
        assert sequence_id not in self.tables, f"{sequence_id} has a table"
        full = swapped.num_tokens // self.block_size * self.block_size
        nodes = list(self.cache.path(token_ids[:full], salt)) if self.prefix_caching else []
        found = [
            {b: nodes[b].ids[i] for b in held if b < len(nodes) and nodes[b].ids[i] != NO_BLOCK}
            for i, held in enumerate(swapped.blocks)
        ]
        for pool, held, known in zip(self.pools, swapped.blocks, found, strict=True):
            cached = sum(pool.ref_counts[block_id] == 0 for block_id in known.values())
            if len(held) - len(known) + cached > pool.num_available:
                return None
        table = self._new_table()
        table.resize(swapped.num_blocks)
        table.num_tokens = table.allocated = swapped.num_tokens
        self.tables[sequence_id] = table
        return self._restore(table, swapped, found)

    def _restore(
        self, table: BlockTable, swapped: SwappedTable, found: Sequence[dict[int, int]]
    ) -> Restored:
        for pool, known in zip(self.pools, found, strict=True):
            for block_id in known.values():  # first, lest `take` evict them
                pool.share(block_id)
        rows, ids = [], []
        for index, pool in enumerate(self.pools):
            taken = {b: pool.take() for b in swapped.blocks[index] if b not in found[index]}
            for block, block_id in (found[index] | taken).items():
                table.columns[index][block] = block_id
            rows.append(tuple(i for i, b in enumerate(swapped.blocks[index]) if b in taken))
            ids.append(tuple(taken.values()))
        return Restored(ids=_per_group(ids), rows=tuple(rows))

    # --- counting ------------------------------------------------------------------------------

    def blocks_for(self, num_tokens: int) -> Counts:
        """Blocks per column that let one sequence grow, block by block, to num_tokens."""
        return tuple(n for group in self.groups for n in group.blocks_for_tokens(num_tokens))

    def held_by(self, sequence_id: str) -> Counts:
        """Blocks per column that a sequence holds."""
        table = self.tables.get(sequence_id)
        if table is None:
            return (0,) * len(self.columns)
        return tuple(len(column) - column.count(NO_BLOCK) for column in table.columns)

    def cost_of(self, hit: PrefixHit, num_tokens: int) -> Counts:
        """Available blocks per column that it takes to grow to num_tokens from a hit."""
        costs = list(self.blocks_for(num_tokens))
        for index, column in enumerate(self.columns):
            for block in _blocks(column.held(hit.num_tokens)):
                live = self.pools[index].ref_counts[hit.nodes[block].ids[index]] > 0
                costs[index] -= live
        return tuple(costs)

    def num_shared_tokens(self, sequence_id: str) -> int:
        """Tokens at a sequence's beginning whose blocks other sequences hold, too."""
        table = self.tables[sequence_id]
        for block in range(table.num_tokens // self.block_size):
            for pool, column in zip(self.pools, table.columns, strict=True):
                if column[block] != NO_BLOCK and pool.ref_counts[column[block]] == 1:
                    return block * self.block_size
        return table.num_tokens // self.block_size * self.block_size

    def fits_alone(self, num_tokens: int) -> bool:
        """Whether a sequence of num_tokens could run with all pools to itself."""
        needs = self.blocks_for(num_tokens)
        return all(n <= pool.size for n, pool in zip(needs, self.pools, strict=True))

    def check_integrity(self) -> None:
        """Raise AssertionError when tables, cache, reference counts and free lists disagree."""
        tables = self.tables.values()
        self.cache.check_integrity([t.node for t in tables if t.node is not None])
        for index, pool in enumerate(self.pools):
            held = [b for t in tables for b in t.columns[index] if b != NO_BLOCK]
            pool.check_integrity(held, self.cache.findable(index))

    # --- inside --------------------------------------------------------------------------------

    def _new_table(self) -> BlockTable:
        return BlockTable([[] for _ in self.columns])

    def _missing(self, table: BlockTable, index: int, end: int, certain_end: int) -> list[int]:
        """Logical blocks of a column that need a new id for a step up to `end`."""
        column, ids = self.columns[index], table.columns[index]
        return [
            block
            for block in range(table.num_tokens // self.block_size, self._num_blocks(end))
            if (block >= len(ids) or ids[block] == NO_BLOCK)
            and column.needs(block, end, certain_end)
        ]

    def _shared_tail(self, table: BlockTable) -> list[int]:
        """Columns whose partial block others hold, too: it must be copied before it's written."""
        if not table.tail_is_shared:
            return []
        tail = table.num_tokens // self.block_size
        return [
            index
            for index, (pool, ids) in enumerate(zip(self.pools, table.columns, strict=True))
            if ids[tail] != NO_BLOCK and pool.ref_counts[ids[tail]] > 1
        ]

    def _copy_tail(self, table: BlockTable, index: int) -> None:
        pool, tail = self.pools[index], table.num_tokens // self.block_size
        source, target = table.columns[index][tail], self.pools[index].take()
        table.copies.append(BlockCopy(self.columns[index].index, source, target))
        table.columns[index][tail] = target
        pool.release(source)

    def _publish(self, table: BlockTable, end: int, token_ids: Sequence[int], salt: str) -> None:
        """Enter the blocks that are full now; where the cache has one already, P2 makes it equal
        bit for bit, and ours is given up for it.
        """
        size = self.block_size
        if end // size == (0 if table.node is None else table.node.depth):
            return
        node = self.cache.root(salt) if table.node is None else table.node
        for block in range(node.depth, end // size):
            node = self.cache.child(node, tuple(token_ids[block * size : (block + 1) * size]))
            self._share_block(table, block, node)
        self.cache.pin(node)
        self.cache.unpin(table.node)
        table.node = node

    def _share_block(self, table: BlockTable, block: int, node: PrefixNode) -> None:
        for index, (column, pool) in enumerate(zip(self.columns, self.pools, strict=True)):
            ours, theirs = table.columns[index][block], node.ids[index]
            if ours == NO_BLOCK or not column.reusable(block):
                continue
            if theirs == NO_BLOCK:
                self.cache.attach(node, index, ours)
            elif theirs != ours:
                pool.share(theirs)
                pool.release(ours)
                table.columns[index][block] = theirs

    def _release_unread(self, table: BlockTable, end: int) -> None:
        """Release what a sequence of `end` tokens doesn't hold, and cut the table there."""
        first_new = table.num_tokens // self.block_size
        settled = first_new * self.block_size  # steps inside the tail have released nothing
        for column, pool, ids in zip(self.columns, self.pools, table.columns, strict=True):
            kept = column.held(end)
            for (low, _), (new_low, _) in zip(column.held(settled), kept, strict=True):
                for block in range(low, min(new_low, first_new)):
                    self._drop(pool, ids, block)
            for block in range(first_new, len(ids)):
                if not any(low <= block < high for low, high in kept):
                    self._drop(pool, ids, block)
        table.resize(self._num_blocks(end))

    @staticmethod
    def _drop(pool: BlockPool, ids: list[int], block: int) -> None:
        if ids[block] != NO_BLOCK:
            pool.release(ids[block])
            ids[block] = NO_BLOCK

    def _in_open_tail(self, table: BlockTable, end: int) -> bool:
        """Whether a step up to `end` begins and ends inside the last block, which is open then
        and ours alone: nothing to take. Most decode steps are such.
        """
        size = self.block_size
        inside = table.num_tokens % size > 0 and end // size == table.num_tokens // size
        return inside and not table.tail_is_shared

    def _stayed_in_tail(self, table: BlockTable) -> bool:
        """Whether the step under way was such: nothing to publish or to release."""
        size = self.block_size
        start, allocated = table.num_tokens, table.allocated
        return start % size > 0 and allocated // size == start // size

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


def _blocks(ranges: Sequence[tuple[int, int]]) -> list[int]:
    return [block for low, high in ranges for block in range(low, high)]


def _per_group(rows: Sequence[tuple[int, ...]]) -> tuple[BlockIds, ...]:
    return tuple(
        BlockIds(open_ids, sealed_ids)
        for open_ids, sealed_ids in zip(rows[0::2], rows[1::2], strict=True)
    )
