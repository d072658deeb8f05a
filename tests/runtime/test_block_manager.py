from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from qdeploy.kv.config import KVCacheConfig
from qdeploy.kv.groups import KVGroup, KVPoolSize
from qdeploy.runtime.block_manager import BlockManager, SwappedTable
from qdeploy.runtime.block_pool import BlockPool
from runtime.block_world import Block, BlockWorld, Sequence_

SIZE = 8
NAMES = "abcde"


def group(index: int = 0, window: int = 0, dtype: str = "int4", **changes: int) -> KVGroup:
    config = KVCacheConfig(dtype=dtype, block_size=SIZE, **changes)  # type: ignore[arg-type]
    return KVGroup(layers=(index,), config=config, window=window)


def manager(
    groups: Sequence[KVGroup], num_open: int = 99, num_sealed: int = 99, *, caching: bool = True
) -> BlockManager:
    size = KVPoolSize(num_open_blocks=num_open, num_sealed_blocks=num_sealed)
    return BlockManager(groups, [size] * len(groups), prefix_caching=caching)


GROUPS = st.lists(
    st.builds(
        group,
        window=st.sampled_from([0, 0, 1, 2, SIZE, SIZE + 1, 2 * SIZE - 1, 21]),
        dtype=st.sampled_from(["bf16", "int4"]),
        sink_blocks=st.integers(0, 2),
        residual_blocks=st.integers(0, 2),
    ),
    min_size=1,
    max_size=3,
)


class BlockManagerMachine(RuleBasedStateMachine):
    """Model: the tokens of every sequence, and what stands in every block (BlockWorld)."""

    @initialize(
        groups=GROUPS,
        num_open=st.integers(3, 24),
        num_sealed=st.integers(3, 20),
        caching=st.sampled_from([True, True, True, False]),
    )
    def create(
        self, groups: Sequence[KVGroup], num_open: int, num_sealed: int, caching: bool
    ) -> None:
        self.blocks = manager(groups, num_open, num_sealed, caching=caching)
        self.world = BlockWorld(self.blocks)
        self.sequences: dict[str, Sequence_] = {}
        self.pending: list[Sequence_] = []
        self.swapped: dict[str, tuple[Sequence_, SwappedTable, list[list[Block]]]] = {}
        self.swapped_in = self.took_away = False

    def new_name(self) -> str | None:
        return next((n for n in NAMES if n not in self.sequences and n not in self.swapped), None)

    @rule(
        kind=st.integers(0, 1),
        shared=st.integers(1, 5 * SIZE),
        own=st.lists(st.integers(0, 1), max_size=SIZE),
        salt=st.sampled_from(["", "", "", "x"]),
        read=st.sampled_from([True, True, True, False]),
    )
    def start(self, kind: int, shared: int, own: list[int], salt: str, read: bool) -> None:
        name = self.new_name()
        if name is None:
            return
        tokens = [kind] * shared + own
        seq = Sequence_(name, tokens, salt)
        if read:
            hit = self.blocks.match(tokens, salt)
            assert hit.num_tokens < len(tokens)
            assert hit.num_tokens % SIZE == 0
            self.blocks.adopt(name, hit)
            seq.computed = hit.num_tokens
        self.sequences[name] = seq

    @rule(
        data=st.data(),
        all_=st.booleans(),
        count=st.integers(1, 3 * SIZE),
        drafts=st.lists(st.integers(0, 1), max_size=2 * SIZE),
    )
    def allocate(self, data: st.DataObject, all_: bool, count: int, drafts: list[int]) -> None:
        idle = [s for s in self.sequences.values() if s not in self.pending]
        if idle and not all_:
            idle = [data.draw(st.sampled_from(idle))]
        for seq in idle:
            self.allocate_one(seq, count, drafts)

    def allocate_one(self, seq: Sequence_, count: int, drafts: list[int]) -> None:
        if seq.computed == len(seq.tokens):
            seq.tokens.append(count % 2)
        end = min(seq.computed + count, len(seq.tokens))
        decoding = end == len(seq.tokens) == seq.computed + 1
        seq.certain, seq.drafts = end, drafts if decoding else []
        before = self.snapshot(seq.name)
        if not self.blocks.allocate(seq.name, seq.certain):
            assert self.snapshot(seq.name) == before, "a refusal has taken something"
            assert self.lacks(before), "refused although there are enough blocks"
            return
        seq.end = end + len(seq.drafts)
        if not self.blocks.allocate(seq.name, seq.end, certain_end=seq.certain):
            seq.end, seq.drafts = end, []
        self.pending.append(seq)

    def snapshot(self, name: str) -> tuple[object, list[int]]:
        table = self.blocks.tables.get(name)
        ids = None if table is None else table.ids()
        return ids, [pool.num_available for pool in self.blocks.pools]

    def lacks(self, before: tuple[object, list[int]]) -> bool:
        """Nothing more than a step's blocks and one copy each can be asked for."""
        return any(n < 4 + 1 for n in before[1])

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """All pending slices run as one batch, each keeping some of its drafts."""
        self.world.copy(self.blocks.take_copies([seq.name for seq in self.pending]))
        for seq in self.pending:
            self.world.run(seq)
        for seq in self.pending:
            accepted = data.draw(st.integers(0, len(seq.drafts)))
            seq.tokens += seq.drafts[:accepted]
            seq.drafts, seq.computed = [], seq.certain + accepted
            self.blocks.commit(seq.name, seq.computed, seq.tokens, seq.salt)
        self.pending.clear()
        self.swapped_in = self.took_away = False

    @precondition(lambda self: self.at_rest())
    @rule(data=st.data(), again=st.booleans())
    def fork(self, data: st.DataObject, again: bool) -> None:
        parent = data.draw(st.sampled_from(self.at_rest()))
        for _ in range(1 + again):
            child = self.new_name()
            if child is not None:
                self.blocks.fork(parent.name, child)
                tokens = list(parent.tokens)
                self.sequences[child] = Sequence_(child, tokens, parent.salt, parent.computed)

    def at_rest(self) -> list[Sequence_]:
        return [s for s in self.sequences.values() if s.computed and s not in self.pending]

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.sequences)))
        self.blocks.free(name)
        self.took_away = True
        self.drop(name)

    def drop(self, name: str) -> Sequence_:
        seq = self.sequences.pop(name)
        self.pending = [s for s in self.pending if s is not seq]
        return seq

    # The engine reads what goes to the host first, then writes what comes back; and the scheduler
    # admits nothing in a step that preempts.

    def preemptible(self) -> list[str]:
        return [name for name, seq in self.sequences.items() if seq.computed]

    @precondition(lambda self: not self.swapped_in and self.preemptible())
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.preemptible()))
        table, ids = self.blocks.swap_out(name)
        self.took_away = True
        seq = self.drop(name)
        seq.drafts = []
        assert table.num_tokens == seq.computed
        self.swapped[name] = seq, table, self.world.read(ids)

    @precondition(lambda self: not self.took_away and self.swapped)
    @rule(data=st.data())
    def swap_in(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.swapped)))
        seq, table, saved = self.swapped[name]
        before = self.snapshot(name)
        restored = self.blocks.swap_in(name, table, seq.tokens, seq.salt)
        if restored is None:
            assert self.snapshot(name) == before
            return
        self.world.write(restored.ids, restored.rows, saved)
        del self.swapped[name]
        self.sequences[name] = seq
        self.swapped_in = True

    @rule()
    def idle(self) -> None:
        """A step without them: what was taken away is forgotten."""
        if not self.pending:
            self.swapped_in = self.took_away = False

    @invariant()
    def tables_and_cache_are_right(self) -> None:
        if not hasattr(self, "blocks"):
            return
        self.blocks.check_integrity()
        assert set(self.preemptible()) <= set(self.blocks.tables) <= set(self.sequences)
        for seq in self.at_rest():
            self.world.check_table(seq)
            self.check_held(seq)
        for salt in ("", "x"):
            node = self.blocks.cache._top.children.get(salt)
            if node is not None:
                self.world.check_cache(node, salt)

    def check_held(self, seq: Sequence_) -> None:
        """What a sequence at rest holds follows from what later queries read, by enumeration.

        Blocks that left the window may stay until the next block begins.
        """
        open_ids, sealed_ids = self.blocks.tables[seq.name].ids()
        for g, part in enumerate(self.blocks.groups):
            for kind, ids in enumerate((open_ids[g], sealed_ids[g])):
                held = {b for b, i in enumerate(ids) if i >= 0}
                needed = self.needed(part, kind, seq.computed, seq.computed)
                lagging = self.needed(part, kind, seq.computed, seq.computed // SIZE * SIZE)
                assert needed <= held <= lagging

    def needed(self, part: KVGroup, kind: int, num_tokens: int, seen_from: int) -> set[int]:
        """Blocks with tokens that some query at a position ≥ num_tokens reads, in this way."""
        found = set()
        for b in range(-(-num_tokens // SIZE)):
            if part.window and (b + 1) * SIZE <= seen_from - part.window + 1:
                continue
            queries = range(num_tokens // SIZE, num_tokens // SIZE + 8)
            reads = {part.config.reads_sealed(b, q) for q in queries}
            if bool(kind) in reads and (not kind or (b + 1) * SIZE <= num_tokens):
                found.add(b)
        return found

    def teardown(self) -> None:
        """Freed, everything is free or cached."""
        if hasattr(self, "blocks"):
            for name in list(self.sequences):
                self.blocks.free(name)
            assert all(pool.num_live == 0 for pool in self.blocks.pools)
            self.blocks.check_integrity()


BlockManagerMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None
)
TestBlockManagerMachine = BlockManagerMachine.TestCase


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
@pytest.mark.parametrize("sink", [0, 1, 3])
@pytest.mark.parametrize("residual", [0, 1, 2])
@pytest.mark.parametrize("window", [0, 1, SIZE, 20])
@pytest.mark.parametrize("chunk", [1, SIZE])
def test_blocks_for_tokens_is_the_peak_of_growing_block_by_block(
    dtype: str, sink: int, residual: int, window: int, chunk: int
) -> None:
    kv = group(0, window, dtype, sink_blocks=sink, residual_blocks=residual)
    blocks = manager([kv], caching=False)
    peak = (0, 0)
    for end in range(chunk, 8 * SIZE, chunk):
        assert blocks.allocate("a", end)
        peak = tuple(max(p, pool.num_live) for p, pool in zip(peak, blocks.pools, strict=True))
        blocks.commit("a", end)
        assert all(p <= n for p, n in zip(peak, blocks.blocks_for(end), strict=True))
        if not window:
            assert chunk == SIZE or peak == blocks.blocks_for(end)


def grow(blocks: BlockManager, name: str, tokens: list[int], salt: str = "") -> int:
    """Compute a whole sequence at once; returns what the cache had of it."""
    hit = blocks.match(tokens, salt)
    blocks.adopt(name, hit)
    assert blocks.allocate(name, len(tokens))
    blocks.commit(name, len(tokens), tokens, salt)
    return hit.num_tokens


def test_a_full_hit_leaves_the_last_token() -> None:
    blocks = manager([group()])
    tokens = list(range(4 * SIZE))
    assert grow(blocks, "a", tokens) == 0
    assert grow(blocks, "b", tokens) == 3 * SIZE
    assert grow(blocks, "c", [*tokens, 1]) == 4 * SIZE
    assert grow(blocks, "d", [7, *tokens], "salt") == 0
    assert grow(blocks, "e", [7, *tokens], "salt") == 4 * SIZE
    assert grow(blocks, "f", [7, *tokens]) == 0
    a, b = (blocks.tables[name].ids()[1][0] for name in "ab")
    assert a == b, "equal blocks are held once"


class Colliding(int):
    """A token id whose hash says nothing."""

    def __hash__(self) -> int:
        return 1


def test_r06_equal_hashes_are_not_equal_prompts() -> None:
    blocks = manager([group()])
    one, two = ([Colliding(t + k) for t in range(2 * SIZE)] for k in (0, 100))
    assert len({hash(tuple(tokens[:SIZE])) for tokens in (one, two)}) == 1
    grow(blocks, "a", one)
    assert grow(blocks, "b", [*two, Colliding(1)]) == 0
    assert grow(blocks, "c", [*one[:SIZE], *two[:SIZE], Colliding(1)]) == SIZE
    assert grow(blocks, "d", [*one, Colliding(1)]) == 2 * SIZE
    assert blocks.tables["d"].ids()[1][0][:2] == blocks.tables["a"].ids()[1][0]


def test_the_partial_last_block_is_never_found() -> None:
    blocks = manager([group()])
    tokens = list(range(2 * SIZE + 3))
    grow(blocks, "a", tokens)
    assert grow(blocks, "b", [*tokens, 5, 6]) == 2 * SIZE


def test_a_residual_cuts_the_hit_back_to_where_blocks_are_open() -> None:
    blocks = manager([group(residual_blocks=1, sink_blocks=0)])
    tokens = list(range(6 * SIZE))
    grow(blocks, "a", tokens)  # at once: of the last block only there is an open copy
    assert blocks.match(tokens[: 5 * SIZE]).num_tokens == 0
    assert blocks.match([*tokens, 1]).num_tokens == 6 * SIZE
    grow(blocks, "b", [*tokens[: 3 * SIZE], 9])
    assert blocks.match([*tokens[: 3 * SIZE], 8]).num_tokens == 3 * SIZE


def test_a_window_needs_only_its_own_blocks() -> None:
    full, windowed = group(0), group(1, window=10)
    blocks = manager([full, windowed])
    tokens = list(range(8 * SIZE))
    grow(blocks, "a", tokens)
    opened, sealed = blocks.tables["a"].ids()
    assert [i >= 0 for i in sealed[1]] == [False] * 6 + [True] * 2
    assert opened[1] == (-1,) * 8
    assert blocks.match([*tokens, 1]).num_tokens == 8 * SIZE
    assert grow(blocks, "b", [*tokens[: 6 * SIZE], 0, 0]) == 6 * SIZE, "released, but still there"


def test_eviction_takes_the_deepest_block_of_the_oldest_prefix() -> None:
    blocks = manager([group(sink_blocks=0)], num_sealed=6)
    one, two = [1] * (3 * SIZE), [2] * (3 * SIZE)
    for name, tokens in (("a", one), ("b", two)):
        grow(blocks, name, tokens)
        blocks.free(name)
    grow(blocks, "c", [3] * SIZE)
    assert blocks.match([*one, 1]).num_tokens == 2 * SIZE
    assert blocks.match([*two, 1]).num_tokens == 3 * SIZE
    assert blocks.pools[1].num_cached == 5
    assert blocks.pools[1].num_live == 1
    blocks = manager([group()])
    grow(blocks, "a", [1] * (3 * SIZE + 2))
    blocks.free("a")
    assert [pool.num_cached for pool in blocks.pools] == [1, 2], "the sink, and what is sealed"


def test_r07_forks_copy_the_partial_tail_and_counts_return_to_zero() -> None:
    blocks = manager([group(dtype="bf16")], num_open=7)
    tokens = list(range(2 * SIZE + 1))
    assert blocks.allocate("0", len(tokens))
    blocks.commit("0", len(tokens), tokens)
    for child in "123":
        blocks.fork("0", child)
    assert blocks.pools[0].num_live == 3
    for name in "0123":
        assert blocks.allocate(name, len(tokens) + 1)
    copies = blocks.take_copies(list("0123"))
    assert [c.source for c in copies] == [2, 2, 2], "the last one keeps the original"
    assert len({c.target for c in copies}) == 3
    for name in "0123":
        blocks.commit(name, len(tokens) + 1, [*tokens, int(name)])
        blocks.free(name)
    assert blocks.pools[0].num_live == 0
    blocks.check_integrity()


def test_a_fork_swapped_out_before_its_copy_is_read_where_it_comes_from() -> None:
    blocks = manager([group(dtype="bf16")])
    tokens = list(range(SIZE + 3))
    grow(blocks, "a", tokens)
    blocks.fork("a", "b")
    assert blocks.allocate("b", SIZE + 4)
    (copy,) = blocks.take_copies(["b"])
    table, (ids,) = blocks.swap_out("b")
    assert ids.open == (0, copy.source)
    assert table.num_tokens == SIZE + 3
    restored = blocks.swap_in("b", table, tokens, "")
    assert restored is not None
    assert restored.rows[0] == (1,), "the full block is shared again"
    assert blocks.take_copies(["b"]) == []


def test_a_rejected_draft_gives_its_blocks_back() -> None:
    blocks = manager([group()])
    tokens = list(range(2 * SIZE - 2))
    grow(blocks, "a", tokens)
    live = [pool.num_live for pool in blocks.pools]
    assert blocks.allocate("a", 2 * SIZE + 2, certain_end=2 * SIZE - 1)
    assert [pool.num_live for pool in blocks.pools] == [live[0] + 1, live[1] + 1]
    blocks.commit("a", 2 * SIZE - 1, [*tokens, 7])
    assert [pool.num_live for pool in blocks.pools] == live
    assert blocks.match([*tokens, 7, 8, 9]).num_tokens == SIZE


def test_without_a_cache_nothing_is_found() -> None:
    blocks = manager([group()], caching=False)
    grow(blocks, "a", [1] * 20)
    assert grow(blocks, "b", [1] * 20) == 0
    blocks.free("a")
    blocks.free("b")
    assert all(pool.num_free == pool.size for pool in blocks.pools)


def test_pool_counts_holders() -> None:
    forgotten: list[int] = []
    pool = BlockPool("open", 2, forgotten.append)
    block = pool.take()
    pool.share(block)
    pool.release(block)
    assert pool.num_live == 1
    pool.publish(block)
    pool.release(block)
    assert (pool.num_free, pool.num_cached, pool.num_live) == (1, 1, 0)
    with pytest.raises(ValueError, match="released twice"):
        pool.release(block)
    pool.share(block)
    assert pool.num_cached == 0
    pool.release(block)
    assert [pool.take(), pool.take()] == [1, 0]
    assert forgotten == [0]
    pool.release(0)
    with pytest.raises(ValueError, match="can't be shared"):
        pool.share(0)
    with pytest.raises(ValueError, match="can't be published"):
        pool.publish(0)


def test_integrity_check_sees_a_leak() -> None:
    blocks = manager([group()])
    blocks.allocate("a", 3)
    del blocks.tables["a"]
    with pytest.raises(AssertionError, match="disagree"):
        blocks.check_integrity()


def test_scheduler_and_block_manager_import_no_torch() -> None:
    code = "import sys, qdeploy.runtime.scheduler, qdeploy.runtime.kv_budget; "
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
