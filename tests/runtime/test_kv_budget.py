from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdeploy.errors import CapacityError, UsageError
from qdeploy.kv.config import KVCacheConfig
from qdeploy.kv.groups import KVGroup, KVPoolSize
from qdeploy.runtime.kv_budget import plan_kv_pools

OPEN, SEALED = 16_000, 4_500


def group(dtype: str, **changes: int) -> KVGroup:
    return KVGroup(layers=(0,), config=KVCacheConfig(dtype=dtype, **changes))  # type: ignore[arg-type]


def plan(dtype: str = "int4", *, sealed: int = SEALED, **changes: Any) -> KVPoolSize:
    options = {"max_model_len": 1024, "max_num_seqs": 4} | changes
    (pools,) = plan_kv_pools([group(dtype)], [OPEN], [sealed], **options)
    return pools


def test_split_is_exact() -> None:
    """Four sequences of 1,024 tokens, the spare, and four prefixes at rest; then block by block."""
    num_bytes = 4 * (2 * OPEN + 15 * SEALED) + 2 * OPEN + 4 * (OPEN + 15 * SEALED)
    pools = plan(kv_cache_memory_bytes=num_bytes)
    assert pools == KVPoolSize(num_open_blocks=14, num_sealed_blocks=120)
    pools = plan(kv_cache_memory_bytes=num_bytes + 5 * SEALED + 1)
    assert pools == KVPoolSize(num_open_blocks=14, num_sealed_blocks=125)


def test_bf16_is_all_open() -> None:
    assert plan("bf16", sealed=0, kv_cache_memory_bytes=1_000_000) == KVPoolSize(
        num_open_blocks=62, num_sealed_blocks=0
    )


def test_r27_blocks_scale_with_real_bytes() -> None:
    full = plan("bf16", sealed=0, kv_cache_memory_bytes=1_000_000).num_open_blocks
    eight = plan("int8", sealed=8_500, kv_cache_memory_bytes=1_000_000)
    four = plan("int4", kv_cache_memory_bytes=1_000_000)
    assert full < eight.num_sealed_blocks < four.num_sealed_blocks
    assert four.num_sealed_blocks > 1.6 * eight.num_sealed_blocks


def test_r27_a_length_that_fits_only_quantized() -> None:
    with pytest.raises(CapacityError, match=r"max_model_len=2048 needs 512000 bytes .* as bf16"):
        plan("bf16", sealed=0, kv_cache_memory_bytes=300_000, max_model_len=2048)
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
    one = group(dtype, sink_blocks=sink, residual_blocks=residual)
    costs = [OPEN], [SEALED if dtype == "int4" else 0]

    def attempt(max_model_len: int) -> KVPoolSize:
        (pools,) = plan_kv_pools(
            [one],
            *costs,
            max_model_len=max_model_len,
            max_num_seqs=seqs,
            kv_cache_memory_bytes=total,
        )
        return pools

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
    num_open, num_sealed = one.blocks_for_tokens(length)
    assert pools.num_open_blocks >= num_open
    assert pools.num_sealed_blocks >= num_sealed
    used = pools.num_open_blocks * OPEN + pools.num_sealed_blocks * SEALED
    assert used <= total < used + OPEN


def test_num_kv_blocks_counts_all_pools() -> None:
    pools = plan(num_kv_blocks=40)
    assert pools.num_open_blocks + pools.num_sealed_blocks == 40
    assert plan(num_kv_blocks=17) == KVPoolSize(num_open_blocks=2, num_sealed_blocks=15)
    with pytest.raises(CapacityError, match="num_kv_blocks=17"):
        plan(num_kv_blocks=16)
    with pytest.raises(UsageError, match="not both"):
        plan(num_kv_blocks=40, kv_cache_memory_bytes=1)


def test_default_holds_every_sequence_at_full_length() -> None:
    pools = plan()
    num_open, num_sealed = group("int4").blocks_for_tokens(1024)
    assert pools.num_open_blocks >= 4 * num_open
    assert pools.num_sealed_blocks >= 4 * num_sealed
