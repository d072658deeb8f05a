"""Pools hold what the arithmetic says, and bytes don't depend on how tokens arrived."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch

from qdeploy.kv.config import KVCacheConfig
from qdeploy.kv.groups import KVPoolSize, kv_groups
from qdeploy.kv.pool import KVPools, open_block_bytes, sealed_block_bytes
from qdeploy.models.spec import DecoderSpec, spec_from_config
from qdeploy.runtime.batch import StepBatch
from qdeploy.runtime.executors import load_executor
from tables import SequenceTables, fresh_pools
from tiny_models import tiny_checkpoint, tiny_config


def tiny_spec(head_dim: int = 64) -> DecoderSpec:
    config = tiny_config("llama", head_dim=head_dim).to_dict()
    return spec_from_config(config | {"architectures": ["LlamaForCausalLM"]})


@pytest.mark.parametrize("dtype", ["bf16", "int8", "int4", "k8v4", "fp8"])
@pytest.mark.parametrize("size", [8, 64])
def test_stored_bytes_are_the_arithmetic(dtype: str, size: int) -> None:
    spec, config = tiny_spec(), KVCacheConfig(dtype=dtype, block_size=size)
    (group,) = kv_groups(spec, config)
    pools = KVPools(spec, group, KVPoolSize(num_open_blocks=3, num_sealed_blocks=5))
    assert pools.open.nbytes == 3 * open_block_bytes(spec, group, itemsize=4)
    assert pools.sealed.nbytes == 5 * sealed_block_bytes(spec, group)
    assert pools.num_bytes == pools.open.nbytes + pools.sealed.nbytes
    assert config.seals == (pools.sealed.nbytes > 0)


def test_x11_int4_bytes_per_token_against_bf16() -> None:
    spec = tiny_spec()
    (group,), (plain,) = (kv_groups(spec, KVCacheConfig(dtype=d)) for d in ("int4", "bf16"))
    bf16 = open_block_bytes(spec, plain, itemsize=2)
    assert bf16 == spec.num_layers * 2 * spec.num_kv_heads * spec.head_dim * 64 * 2
    assert sealed_block_bytes(spec, group) <= 0.32 * bf16


@pytest.mark.parametrize("dtype", ["int8", "int4", "k8v4", "fp8"])
def test_x10_168_single_tokens_equal_168_at_once(tmp_path: Path, dtype: str) -> None:
    folder = tiny_checkpoint("llama", tmp_path / "m")
    config = KVCacheConfig(dtype=dtype, block_size=32, sink_blocks=0, residual_blocks=1)
    executor = load_executor(folder, backend="reference", kv_config=config)
    tokens = torch.randint(0, 256, (168,), generator=torch.Generator().manual_seed(0)).tolist()
    stored = []
    for step in (1, 168):
        tables = SequenceTables(fresh_pools(executor))
        for start in range(0, 168, step):
            piece = tables.slice(tokens[start : start + step], start, num_logits=0)
            executor.execute(StepBatch([piece]))
        (pools,) = executor._pools  # type: ignore[attr-defined]
        stored.append(pools.sealed[[tables.groups[0].sealed[block] for block in range(168 // 32)]])
    assert stored[0].shape[0] == 5
    assert torch.equal(*stored)


def test_x11_groups_never_cross_sequences(tmp_path: Path) -> None:
    """Two sequences interleaved token by token seal the bytes that each seals alone."""
    folder = tiny_checkpoint("llama", tmp_path / "m")
    config = KVCacheConfig(dtype="int4", block_size=16, sink_blocks=0)
    executor = load_executor(folder, backend="reference", kv_config=config)
    texts = [torch.arange(i, i + 48).tolist() for i in (0, 100)]

    def sealed(which: list[int]) -> dict[int, torch.Tensor]:
        ids = fresh_pools(executor)
        tables = {i: SequenceTables(ids) for i in which}
        for start in range(48):
            pieces = [tables[i].slice(texts[i][start : start + 1], start, 1) for i in which]
            executor.execute(StepBatch(pieces))
        (pools,) = executor._pools  # type: ignore[attr-defined]
        return {i: pools.sealed[[tables[i].groups[0].sealed[b] for b in range(3)]] for i in which}

    together = sealed([0, 1])
    for i in (0, 1):
        assert torch.equal(together[i], sealed([i])[i])


def test_pools_take_no_memory_before_they_are_written() -> None:
    """2 GiB of them would take seconds to fill."""
    spec = tiny_spec()
    (group,) = kv_groups(spec, KVCacheConfig(block_size=16))
    blocks = 2**31 // open_block_bytes(spec, group, itemsize=4)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pools = KVPools(spec, group, KVPoolSize(num_open_blocks=blocks, num_sealed_blocks=0))
    assert pools.open.nbytes > 2**31 - 2**20
    assert float(pools.open[-1].sum()) == 0
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 64 * 1024


def test_more_than_memory_is_an_error_of_ours() -> None:
    spec = tiny_spec()
    (group,) = kv_groups(spec, KVCacheConfig())
    for blocks in (2**45, 2**62):
        with pytest.raises(RuntimeError):
            KVPools(spec, group, KVPoolSize(num_open_blocks=blocks, num_sealed_blocks=0))
