from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from qdeploy.kv.config import KVCacheConfig
from qdeploy.kv.groups import KVGroup, KVPoolSize
from qdeploy.runtime.block_manager import BlockManager
from qdeploy.runtime.block_pool import BlockPool

SIZE = 8


def manager(kv: KVCacheConfig, num_open: int, num_sealed: int) -> BlockManager:
    size = KVPoolSize(num_open_blocks=num_open, num_sealed_blocks=num_sealed)
    return BlockManager([KVGroup(layers=(0,), config=kv)], [size])


class BlockManagerMachine(RuleBasedStateMachine):
    """Model: name → committed tokens. Which blocks must be held follows from the position rule."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: dict[str, int] = {}
        self.step: dict[str, int] = {}

    @precondition(lambda self: not hasattr(self, "blocks"))
    @rule(
        dtype=st.sampled_from(["bf16", "int4"]),
        sink=st.integers(0, 2),
        residual=st.integers(0, 2),
        num_open=st.integers(0, 12),
        num_sealed=st.integers(0, 8),
    )
    def create(self, dtype: str, sink: int, residual: int, num_open: int, num_sealed: int) -> None:
        self.kv = KVCacheConfig(
            dtype=dtype, block_size=SIZE, sink_blocks=sink, residual_blocks=residual
        )
        self.blocks = manager(self.kv, num_open, num_sealed)

    @precondition(lambda self: hasattr(self, "blocks"))
    @rule(name=st.sampled_from("abc"), tokens=st.integers(1, 3 * SIZE))
    def allocate(self, name: str, tokens: int) -> None:
        if name in self.step:
            return
        (group,) = self.blocks.groups
        before = (group.open_pool.num_free, group.sealed_pool.num_free)
        end = self.lengths.get(name, 0) + tokens
        need = self.need(self.lengths.get(name, 0), end)
        granted = self.blocks.allocate(name, end)
        after = (group.open_pool.num_free, group.sealed_pool.num_free)
        assert granted == (need[0] <= before[0] and need[1] <= before[1])
        used = (before[0] - after[0], before[1] - after[1])
        assert used == (need if granted else (0, 0))
        if granted:
            self.step[name] = end

    @precondition(lambda self: hasattr(self, "blocks") and self.step)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.step)))
        self.lengths[name] = self.step.pop(name)
        self.blocks.commit(name, self.lengths[name])

    @precondition(lambda self: hasattr(self, "blocks"))
    @rule(name=st.sampled_from("abc"))
    def free(self, name: str) -> None:
        self.blocks.free(name)
        self.lengths.pop(name, None)
        self.step.pop(name, None)

    @invariant()
    def tables_follow_the_rule(self) -> None:
        if not hasattr(self, "blocks"):
            return
        self.blocks.check_integrity()
        assert set(self.blocks.tables) == set(self.lengths) | set(self.step)
        for name, table in self.blocks.tables.items():
            start = self.lengths.get(name, 0)
            end = self.step.get(name, start)
            (part,) = table.groups
            assert table.ids() == ((tuple(part.open_blocks),), (tuple(part.sealed_blocks),))
            held = self.open_after(start) | self.open_after(end)
            assert {b for b, i in enumerate(part.open_blocks) if i >= 0} == held
            assert {b for b, i in enumerate(part.sealed_blocks) if i >= 0} == self.sealed_by(end)

    def open_after(self, end: int) -> set[int]:
        """Blocks with tokens that some query at a position ≥ end reads open (by enumeration)."""
        queries = range(end // SIZE, end // SIZE + 8)
        filled = range(-(-end // SIZE))
        return {b for b in filled if any(not self.kv.reads_sealed(b, q) for q in queries)}

    def sealed_by(self, end: int) -> set[int]:
        return {b for b in range(end // SIZE) if self.kv.reads_sealed(b, 10**6)}

    def need(self, start: int, end: int) -> tuple[int, int]:
        opened = self.open_after(end) - self.open_after(start)
        return len(opened), len(self.sealed_by(end) - self.sealed_by(start))


BlockManagerMachine.TestCase.settings = settings(
    max_examples=80, stateful_step_count=30, deadline=None
)
TestBlockManagerMachine = BlockManagerMachine.TestCase


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
@pytest.mark.parametrize("sink", [0, 1, 3])
@pytest.mark.parametrize("residual", [0, 1, 2])
def test_blocks_for_tokens_is_exactly_the_peak_of_decoding(
    dtype: str, sink: int, residual: int
) -> None:
    kv = KVCacheConfig(dtype=dtype, block_size=SIZE, sink_blocks=sink, residual_blocks=residual)
    blocks = manager(kv, 99, 99)
    (group,) = blocks.groups
    peak = 0
    for end in range(1, 8 * SIZE):
        assert blocks.allocate("a", end)
        peak = max(peak, group.open_pool.num_used)
        blocks.commit("a", end)
        assert (peak, group.sealed_pool.num_used) == group.group.blocks_for_tokens(end)


def test_pool_counts_holders() -> None:
    pool = BlockPool("open", 2)
    block = pool.take()
    pool.share(block)
    pool.release(block)
    assert pool.num_used == 1
    pool.release(block)
    assert pool.num_free == 2
    with pytest.raises(ValueError, match="released twice"):
        pool.release(block)
    with pytest.raises(ValueError, match="can't be shared"):
        pool.share(block)


def test_integrity_check_sees_a_leak() -> None:
    blocks = manager(KVCacheConfig(), 4, 0)
    blocks.allocate("a", 3)
    del blocks.tables["a"]
    with pytest.raises(AssertionError, match="disagree"):
        blocks.check_integrity()


def test_scheduler_and_block_manager_import_no_torch() -> None:
    code = "import sys, qdeploy.runtime.scheduler, qdeploy.runtime.kv_budget; "
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
