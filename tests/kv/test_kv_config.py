"""The position rule and its bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdeploy.errors import UsageError
from qdeploy.kv.config import KV_DTYPES, KVCacheConfig


@pytest.mark.parametrize("size", [0, 4, 24, 63, -16])
def test_block_size_is_a_power_of_two_from_8(size: int) -> None:
    with pytest.raises(UsageError, match=f"block_size={size}"):
        KVCacheConfig(block_size=size)


def test_unknown_formats_are_named() -> None:
    with pytest.raises(UsageError, match=r"'int3'.*bf16, int8, int4, k8v4, fp8"):
        KVCacheConfig(dtype="int3")


def test_negative_windows_are_refused() -> None:
    for bad in ({"sink_blocks": -1}, {"residual_blocks": -1}):
        with pytest.raises(UsageError):
            KVCacheConfig(**bad)  # type: ignore[arg-type]


@given(
    st.sampled_from(KV_DTYPES),
    st.integers(0, 3),
    st.integers(0, 3),
    st.integers(0, 9),
    st.integers(0, 9),
)
def test_a_block_once_sealed_stays_sealed(
    dtype: str, sink: int, residual: int, block: int, query: int
) -> None:
    config = KVCacheConfig(dtype=dtype, sink_blocks=sink, residual_blocks=residual)
    sealed = config.reads_sealed(block, query)
    assert not (sealed and block >= query), "a query's own block is open"
    assert not (sealed and (block < sink or dtype == "bf16"))
    assert not sealed or config.reads_sealed(block, query + 1)
