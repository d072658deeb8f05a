from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdeploy.errors import CapacityError, UsageError
from qdeploy.kv.config import KVCacheConfig
from qdeploy.runtime.block_manager import blocks_for_tokens
from qdeploy.runtime.kv_budget import KVPools, plan_kv_pools


def plan(dtype: str = "int4", **changes: int | None) -> KVPools:
    options: dict[str, int | None] = {
        "max_model_len": 1024,
        "max_num_seqs": 4,
        "open_block_bytes": 16_000,
        "sealed_block_bytes": 4_500,
    }
    return plan_kv_pools(kv=KVCacheConfig(dtype=dtype), **(options | changes))


def test_split_is_exact() -> None:
    pools = plan(kv_cache_memory_bytes=1_000_000)
    assert pools.num_open_blocks == 4 * 2 + 1  # sink + tail each, one filling
    assert pools.num_sealed_blocks == (1_000_000 - 9 * 16_000) // 4_500


def test_bf16_is_all_open() -> None:
    assert plan("bf16", kv_cache_memory_bytes=1_000_000) == KVPools(
        num_open_blocks=62, num_sealed_blocks=0
    )


def test_r27_blocks_scale_with_real_bytes() -> None:
    full = plan("bf16", kv_cache_memory_bytes=1_000_000).num_open_blocks
    eight = plan("int8", kv_cache_memory_bytes=1_000_000, sealed_block_bytes=8_500)
    four = plan("int4", kv_cache_memory_bytes=1_000_000)
    assert full < eight.num_sealed_blocks < four.num_sealed_blocks
    assert four.num_sealed_blocks > 1.8 * eight.num_sealed_blocks


def test_r27_a_length_that_fits_only_quantized() -> None:
    with pytest.raises(CapacityError, match=r"max_model_len=2048 needs 512000 bytes .* as bf16"):
        plan("bf16", kv_cache_memory_bytes=300_000, max_model_len=2048)
    assert plan("int4", kv_cache_memory_bytes=300_000, max_model_len=2048)


@given(
    total=st.integers(0, 500_000),
    length=st.integers(1, 5000),
    seqs=st.integers(1, 9),
    dtype=st.sampled_from(["bf16", "int4"]),
    sink=st.integers(0, 2),
    residual=st.integers(0, 2),
)
def test_the_longest_request_fits_or_the_error_names_one_that_does(
    total: int, length: int, seqs: int, dtype: str, sink: int, residual: int
) -> None:
    kv = KVCacheConfig(dtype=dtype, sink_blocks=sink, residual_blocks=residual)
    costs = {"open_block_bytes": 16_000, "sealed_block_bytes": 4_500, "max_num_seqs": seqs}

    def attempt(max_model_len: int) -> KVPools:
        return plan_kv_pools(
            kv=kv, max_model_len=max_model_len, kv_cache_memory_bytes=total, **costs
        )

    try:
        pools = attempt(length)
    except CapacityError as error:
        message = str(error)
        assert "\n" not in message
        longest = (
            int(message.split("give max_model_len=")[1].split(",")[0])
            if ("give max_model_len" in message)
            else 0
        )
        if longest:
            assert attempt(longest)
        with pytest.raises(CapacityError):
            attempt(longest + 1)
        return
    need = blocks_for_tokens(kv, length)
    assert pools.num_open_blocks >= need[0]
    assert pools.num_sealed_blocks >= need[1]
    used = pools.num_open_blocks * 16_000 + pools.num_sealed_blocks * 4_500
    assert used <= total < used + 16_000


def test_num_kv_blocks_counts_both_pools() -> None:
    pools = plan(num_kv_blocks=40)
    assert pools.num_open_blocks + pools.num_sealed_blocks == 40
    assert plan(num_kv_blocks=17) == KVPools(num_open_blocks=2, num_sealed_blocks=15)
    with pytest.raises(CapacityError, match="num_kv_blocks=17"):
        plan(num_kv_blocks=16)
    with pytest.raises(UsageError, match="not both"):
        plan(num_kv_blocks=40, kv_cache_memory_bytes=1)


def test_default_holds_every_sequence_at_full_length() -> None:
    pools = plan()
    need = blocks_for_tokens(KVCacheConfig(dtype="int4"), 1024)
    assert pools.num_open_blocks >= 4 * need[0]
    assert pools.num_sealed_blocks >= 4 * need[1]
