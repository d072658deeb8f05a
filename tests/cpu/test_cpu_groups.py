"""How layers are grouped is bookkeeping: it changes no bit. What the library refuses of blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from qdeploy.kv.config import KVCacheConfig, LayerPolicy
from qdeploy.kv.groups import KVGroup, kv_groups
from qdeploy.runtime.batch import BlockCopy, BlockIds, SequenceSlice, StepBatch
from qdeploy.runtime.executors import cpu, load_executor
from qdeploy.runtime.executors.base import Executor
from tables import fresh_pools, pool_sizes, run_chunks
from tiny_models import tiny_checkpoint

LENGTH = 91
TOKENS = torch.randint(0, 256, (LENGTH,), generator=torch.Generator().manual_seed(5)).tolist()
INT4 = KVCacheConfig(dtype="int4", block_size=16)
MIXED = replace(
    INT4,
    layers=(
        LayerPolicy(layer=0, dtype="int8", sink_blocks=0, residual_blocks=1),
        LayerPolicy(layer=5, dtype="bf16", sink_blocks=0, residual_blocks=0),
    ),
)

Groups = tuple[KVGroup, ...]


def by_layer(groups: Groups) -> Groups:
    """A group for each layer, the last layer first."""
    single = [replace(g, layers=(layer,)) for g in groups for layer in g.layers]
    return tuple(sorted(single, key=lambda g: -g.layers[0]))


def never_released(groups: Groups) -> Groups:
    """Windowed layers keep all blocks, as if the tables were full."""
    return tuple(replace(g, window=0) for g in groups)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Windows of 24 in six of seven layers."""
    return tiny_checkpoint("gemma3_text", tmp_path_factory.mktemp("gemma"))


def load(folder: Path, kv: KVCacheConfig) -> Executor:
    return load_executor(folder, backend="cpu", kv_config=kv, threads=2)


@pytest.mark.parametrize("policy", [INT4, MIXED], ids=["int4", "mixed"])
@pytest.mark.parametrize("grouping", [by_layer, never_released])
def test_other_groups_give_the_same_bits(
    folder: Path,
    grouping: Callable[[Groups], Groups],
    policy: KVCacheConfig,
    isa: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    natural = load(folder, policy)
    expected = run_chunks(natural, TOKENS, [LENGTH])
    monkeypatch.setattr(cpu, "kv_groups", lambda spec, kv: grouping(kv_groups(spec, kv)))
    other = natural.with_kv(policy)
    assert other.kv_groups != natural.kv_groups
    for bounds in ([LENGTH], [20, 21, 22, 70, LENGTH]):
        assert torch.equal(run_chunks(other, TOKENS, bounds), expected)


def test_a_window_of_a_long_context_skips_splits_that_it_left(folder: Path) -> None:
    """Keys are split at fixed places of 512; a window sees the last of four only."""
    tokens = (TOKENS * 21)[:1900]
    executor = load(folder, replace(INT4, block_size=64))
    whole = run_chunks(executor, tokens, [1900])
    assert torch.equal(run_chunks(executor, tokens, [1890, *range(1891, 1901)]), whole)


def piece() -> SequenceSlice:
    return SequenceSlice(
        token_ids=[1, 2], start=0, open_blocks=[[0]] * 2, sealed_blocks=[[-1]] * 2, num_logits=1
    )


@pytest.mark.parametrize(
    ("copy", "message"),
    [
        (BlockCopy(0, 8, 1), r"open block id 8 can't be copied to 1 in a pool of 8"),
        (BlockCopy(1, 0, 9), r"open block id 0 can't be copied to 9 in a pool of 8"),
        (BlockCopy(1, -1, 0), r"open block id -1"),
        (BlockCopy(0, 3, 3), r"open block id 3 can't be copied to 3"),
        (BlockCopy(2, 0, 1), r"KV group 2"),
        (BlockCopy(-1, 0, 1), r"KV group -1"),
    ],
)
def test_copies_that_the_pools_lack_are_refused(
    folder: Path, copy: BlockCopy, message: str
) -> None:
    executor = load(folder, INT4)
    executor.allocate_kv(pool_sizes(executor, 8, 8))
    with pytest.raises(RuntimeError, match=message):
        executor.execute(StepBatch([piece()], [copy]))
    assert executor.execute(StepBatch([piece()])).isfinite().all()


def test_a_step_may_hold_copies_only(folder: Path) -> None:
    executor = load(folder, INT4)
    fresh_pools(executor, 8)
    first = BlockIds(open=(0,)), BlockIds()
    second = BlockIds(open=(5,)), BlockIds()
    assert not np.array_equal(executor.read_blocks(first), executor.read_blocks(second))
    assert executor.execute(StepBatch([], [BlockCopy(0, 0, 5)])).shape[0] == 0
    assert np.array_equal(executor.read_blocks(first), executor.read_blocks(second))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ((BlockIds(open=(0, 8)), BlockIds()), r"block id 8 is outside the pool of 8"),
        ((BlockIds(), BlockIds(sealed=(-1,))), r"block id -1 is outside the pool of 8"),
    ],
)
def test_blocks_that_the_pools_lack_are_neither_read_nor_written(
    folder: Path, ids: tuple[BlockIds, BlockIds], message: str
) -> None:
    executor = load(folder, INT4)
    executor.allocate_kv(pool_sizes(executor, 8, 8))
    with pytest.raises(RuntimeError, match=message):
        executor.read_blocks(ids)
    size = len(ids[0].open) * executor.open_block_bytes[0]
    size += len(ids[1].sealed) * executor.sealed_block_bytes[1]
    with pytest.raises(RuntimeError, match=message):
        executor.write_blocks(ids, np.zeros(size, np.uint8))


def test_data_of_another_size_or_type_is_refused(folder: Path) -> None:
    executor = load(folder, INT4)
    executor.allocate_kv(pool_sizes(executor, 8, 8))
    ids = BlockIds(open=(0,)), BlockIds(sealed=(1,))
    data = executor.read_blocks(ids)
    for wrong in (data[:-1], np.append(data, np.uint8(0)), data.astype(np.float32)):
        with pytest.raises(RuntimeError, match=f"blocks of {data.size} bytes"):
            executor.write_blocks(ids, wrong)
    executor.write_blocks(ids, np.repeat(data, 2)[::2])  # strided data is as good
    assert np.array_equal(executor.read_blocks(ids), data)
