"""KV groups on every backend: windows release blocks, copies, swapping, a policy per layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from backends import BACKENDS
from executors.driving import executor_of
from qdeploy.kv.config import KVCacheConfig, LayerPolicy
from qdeploy.runtime.batch import BlockCopy, BlockIds, SequenceSlice, StepBatch
from qdeploy.runtime.executors import load_executor
from qdeploy.runtime.executors.base import Executor
from tables import FreeIds, SequenceTables, fresh_pools, run_chunks
from tiny_models import tiny_checkpoint, tiny_model

TOKENS = torch.randint(0, 256, (91,), generator=torch.Generator().manual_seed(5)).tolist()
MIXED = KVCacheConfig(
    dtype="int4",
    block_size=16,
    layers=(
        LayerPolicy(layer=0, dtype="int8", sink_blocks=0, residual_blocks=1),
        LayerPolicy(layer=2, dtype="bf16", sink_blocks=1, residual_blocks=0),
    ),
)
INT4 = replace(MIXED, layers=())


#: Gemma has windows of 24 in six of seven layers; the mixed one is a Llama.
GEMMA = [f"gemma on {backend}" for backend in BACKENDS]
ALL_MIXED = [f"mixed on {backend}" for backend in BACKENDS]


@pytest.fixture(scope="module")
def executors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Executor]:
    gemma = tiny_checkpoint("gemma3_text", tmp_path_factory.mktemp("gemma"))
    llama = tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"))
    models = {"gemma": (gemma, INT4), "mixed": (llama, MIXED)}
    return {
        f"{name} on {backend}": load_executor(folder, backend=backend, kv_config=kv)
        for name, (folder, kv) in models.items()
        for backend in BACKENDS
    }


@pytest.fixture(params=[*GEMMA, *ALL_MIXED])
def executor(executors: dict[str, Executor], request: pytest.FixtureRequest) -> Executor:
    return executors[request.param]


@pytest.fixture(params=GEMMA)
def gemma(executors: dict[str, Executor], request: pytest.FixtureRequest) -> Executor:
    return executors[request.param]


@pytest.fixture(params=ALL_MIXED)
def mixed(executors: dict[str, Executor], request: pytest.FixtureRequest) -> Executor:
    return executors[request.param]


def last_logits(executor: Executor, tables: SequenceTables, tokens: Sequence[int]) -> Tensor:
    """Logits of the last of `tokens`, the others being computed already."""
    return executor.execute(StepBatch([tables.slice(tokens[-1:], len(tokens) - 1, 1)]))[0]


def start(executor: Executor, ids: Sequence[FreeIds], tokens: Sequence[int]) -> SequenceTables:
    """A sequence whose `tokens` are computed."""
    tables = SequenceTables(ids)
    executor.execute(StepBatch([tables.slice(tokens, 0, num_logits=0)]))
    return tables


def held(tables: SequenceTables) -> list[BlockIds]:
    return [BlockIds(tuple(g.open.values()), tuple(g.sealed.values())) for g in tables.groups]


def test_chunks_change_no_bit(executor: Executor) -> None:
    """Blocks that leave a window are given back and written by others at once."""
    whole = run_chunks(executor, TOKENS, [91])
    assert whole.isfinite().all()
    for bounds in ([16, 91], [1, 2, 3, 40, 41, 91], list(range(1, 92))):
        assert torch.equal(run_chunks(executor, TOKENS, bounds), whole)


def test_a_block_before_the_window_is_not_read_whatever_its_id(gemma: Executor) -> None:
    whole = run_chunks(gemma, TOKENS, [91])
    tables = start(gemma, fresh_pools(gemma), TOKENS[:88])
    piece = tables.slice(TOKENS[88:], 88, num_logits=3)
    released = [g for g, group in enumerate(gemma.kv_groups) if group.window]
    assert len(released) == 1 < len(gemma.kv_groups)
    for other in (5, 0, -1):
        opened, sealed = (
            [list(t) for t in piece.open_blocks],
            [list(t) for t in piece.sealed_blocks],
        )
        for g in released:
            assert opened[g][:4] == sealed[g][:4] == [-1] * 4  # 64 ≤ 88 − 24 + 1
            opened[g][:4] = sealed[g][:4] = [other] * 4
        odd = SequenceSlice(
            token_ids=piece.token_ids,
            start=88,
            open_blocks=opened,
            sealed_blocks=sealed,
            num_logits=3,
        )
        assert torch.equal(gemma.execute(StepBatch([odd])), whole[88:])


def test_a_copied_tail_goes_its_own_way(executor: Executor) -> None:
    """Fork: all blocks are shared, and an open one is copied before it is written."""
    common = TOKENS[:70]
    ends = [*common, 1, 2, 3], [*common, 9, 8, 7]
    solo = [run_chunks(executor, tokens, [73])[-1] for tokens in ends]
    ids = fresh_pools(executor)
    leader = start(executor, ids, common)
    follower = SequenceTables(ids)
    follower.share_prefix(leader, 5)
    tail, copies = 70 // 16, []
    for g, tables in enumerate(follower.groups):
        copies.append(BlockCopy(g, tables.open[tail], ids[g].take_open()))
        tables.open[tail] = copies[-1].target
    pieces = [
        t.slice(tokens[70:72], 70, 0) for t, tokens in zip((leader, follower), ends, strict=True)
    ]
    executor.execute(StepBatch(pieces, copies))
    for tables, tokens, expected in zip((leader, follower), ends, solo, strict=True):
        assert torch.equal(last_logits(executor, tables, tokens), expected)


def test_copies_go_one_after_another(executor: Executor) -> None:
    """The second may read what the first wrote."""
    whole = run_chunks(executor, TOKENS[:15], [15])
    ids = fresh_pools(executor)
    tables = start(executor, ids, TOKENS[:14])
    copies = []
    for g, group in enumerate(tables.groups):
        source, between, target = group.open[0], ids[g].take_open(), ids[g].take_open()
        copies += [BlockCopy(g, source, between), BlockCopy(g, between, target)]
        group.open[0] = target
    got = executor.execute(StepBatch([tables.slice(TOKENS[14:15], 14, 1)], copies))
    assert torch.equal(got[0], whole[-1])


def test_swapped_blocks_come_back_under_other_ids(executor: Executor) -> None:
    expected = run_chunks(executor, TOKENS, [91])[-1]
    ids = fresh_pools(executor)
    tables = start(executor, ids, TOKENS[:90])
    data = executor.read_blocks(held(tables))
    sizes = zip(held(tables), executor.open_block_bytes, executor.sealed_block_bytes, strict=True)
    assert data.dtype == np.uint8
    assert data.shape == (sum(len(b.open) * o + len(b.sealed) * s for b, o, s in sizes),)
    assert data.size > 0
    ids = fresh_pools(executor)  # whoever came in between used every block
    for group, pool in zip(tables.groups, ids, strict=True):
        pool.take_open(), pool.take_sealed()
        group.pool = pool
        group.open = {block: pool.take_open() for block in group.open}
        group.sealed = {block: pool.take_sealed() for block in group.sealed}
    executor.write_blocks(held(tables), data)
    assert np.array_equal(executor.read_blocks(held(tables)), data)
    assert torch.equal(last_logits(executor, tables, TOKENS), expected)


def test_data_to_swap_is_in_the_order_of_groups_pools_and_ids(executor: Executor) -> None:
    tables = start(executor, fresh_pools(executor), TOKENS[:90])
    one_by_one = []
    nothing = [BlockIds()] * len(executor.kv_groups)
    for g, blocks in enumerate(held(tables)):
        single = [BlockIds(open=(b,)) for b in blocks.open]
        single += [BlockIds(sealed=(b,)) for b in blocks.sealed]
        for ids in single:
            one_by_one.append(executor.read_blocks([*nothing[:g], ids, *nothing[g + 1 :]]))
    assert np.array_equal(np.concatenate(one_by_one), executor.read_blocks(held(tables)))
    assert executor.read_blocks(nothing).size == 0


def test_every_layer_keeps_its_own_policy(mixed: Executor) -> None:
    """Its own groups, and logits that no single policy gives; values: test_position_oracle."""
    assert [group.layers for group in mixed.kv_groups] == [(0,), (1,), (2,)]
    assert mixed.sealed_block_bytes[2] == 0 < mixed.sealed_block_bytes[1]
    logits = run_chunks(mixed, TOKENS, [91])
    for policy in (INT4, MIXED.for_layer(0), MIXED.for_layer(2)):
        assert not torch.equal(run_chunks(mixed.with_kv(policy), TOKENS, [91]), logits)


def test_p5_a_draft_that_is_nan_leaves_the_rows_before_it() -> None:
    """Drafts are verified in one slice with the tokens before them."""
    executor = executor_of(tiny_model("llama"), INT4)
    well = [t if t != 7 else 8 for t in TOKENS[:45]]
    expected = run_chunks(executor, well, [45])
    executor.weights.embedding[7] = float("nan")
    got = run_chunks(executor, [*well[:40], 7, *well[41:]], [30, 45])
    assert torch.equal(got[:40], expected[:40])
    assert got[40:].isnan().all()
