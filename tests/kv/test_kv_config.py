"""The position rule and its bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdeploy.errors import UsageError
from qdeploy.kv.config import KV_DTYPES, KVCacheConfig, LayerPolicy


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


def own(layer: int, dtype: str = "int8", sink: int = 1, residual: int = 0) -> LayerPolicy:
    return LayerPolicy(layer=layer, dtype=dtype, sink_blocks=sink, residual_blocks=residual)


def int4(*layers: LayerPolicy) -> KVCacheConfig:
    return KVCacheConfig(dtype="int4", layers=layers)


def test_layers_are_in_the_key_neighbours_as_one() -> None:
    config = int4(own(29, "bf16"), own(1), own(0), own(2, "int8", 2), own(4))
    assert config.key == "int4/b64/s1/r0+0-1=int8/s1/r0+2=int8/s2/r0+4=int8/s1/r0+29=bf16/s1/r0"
    assert config.label == config.key.replace("/b64/s1/r0", "", 1)


def test_one_policy_has_one_form() -> None:
    """Order, and what changes nothing, must not make another record of it."""
    plain, layered = int4(), int4(own(0), own(3))
    assert int4(own(3), own(2, "int4"), own(0)) == layered
    assert int4(own(5, "int4")) == plain
    assert hash(int4(own(3), own(0))) == hash(layered)
    assert layered.with_dtype("int4") == plain


def test_every_layer_finds_its_own() -> None:
    config = KVCacheConfig(dtype="int4", block_size=32, layers=(own(2, "bf16", 3, 2),))
    assert config.for_layer(1) == KVCacheConfig(dtype="int4", block_size=32)
    other = KVCacheConfig(dtype="bf16", block_size=32, sink_blocks=3, residual_blocks=2)
    assert config.for_layer(2) == other


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((own(3), own(3, "bf16")), r"layer 3 is given twice"),
        ((own(3), own(3)), r"layer 3 is given twice"),
        ((own(-1),), r"layer -1 is negative"),
        ((own(7, "int3"),), r"'int3' of layer 7.*bf16, int8"),
        ((own(7, "int8", -1),), r"layer 7 must be ≥ 0"),
        ((own(7, "int8", 0, -2),), r"layer 7 must be ≥ 0"),
    ],
)
def test_a_layer_that_can_not_be_is_one_line(layers: tuple[LayerPolicy, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message) as info:
        int4(*layers)
    assert "\n" not in str(info.value)
