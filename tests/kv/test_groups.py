"""Which layers share blocks, and how many blocks a sequence needs of each group."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdeploy.errors import UsageError
from qdeploy.kv.config import KV_DTYPES, KVCacheConfig, LayerPolicy
from qdeploy.kv.groups import KVGroup, kv_groups
from qdeploy.models.spec import DecoderSpec, spec_from_config
from tiny_models import tiny_config

SIZE = 8
NAMES = {"llama": "LlamaForCausalLM", "gemma3_text": "Gemma3ForCausalLM"}


def spec_of(arch: str, **overrides: Any) -> DecoderSpec:
    config = tiny_config(arch, **overrides).to_dict()
    return spec_from_config(config | {"architectures": [NAMES[arch]]})


def policy(layer: int, dtype: str) -> LayerPolicy:
    return LayerPolicy(layer=layer, dtype=dtype, sink_blocks=1, residual_blocks=0)


def test_plain_models_are_one_group() -> None:
    config = KVCacheConfig(dtype="int4")
    assert kv_groups(spec_of("llama"), config) == (KVGroup(layers=(0, 1, 2), config=config),)


def test_windows_and_policies_make_groups_in_the_order_of_layers() -> None:
    layers = (policy(6, "bf16"), policy(2, "int8"), policy(4, "int8"))
    config = KVCacheConfig(dtype="int4", layers=layers)
    groups = kv_groups(spec_of("gemma3_text"), config)
    found = [(group.layers, group.config.dtype, group.window) for group in groups]
    assert found == [
        ((0, 1, 3), "int4", 24),
        ((2, 4), "int8", 24),
        ((5,), "int4", 0),
        ((6,), "bf16", 24),
    ]
    assert not any(group.config.layers for group in groups)


def test_a_window_as_long_as_the_context_is_none() -> None:
    spec = spec_of("gemma3_text", sliding_window=512)
    assert [group.window for group in kv_groups(spec, KVCacheConfig())] == [0]


def test_a_layer_out_of_range_is_named() -> None:
    config = KVCacheConfig(dtype="int4", layers=(policy(3, "bf16"),))
    with pytest.raises(UsageError, match=r"layer 3 .* 3 layers; give 0 … 2"):
        kv_groups(spec_of("llama"), config)


groups = st.builds(
    KVGroup,
    layers=st.just((0,)),
    window=st.sampled_from([0, 0, 1, 2, 7, 8, 9, 16, 17, 20, 40]),
    config=st.builds(
        KVCacheConfig,
        dtype=st.sampled_from(KV_DTYPES),
        block_size=st.just(SIZE),
        sink_blocks=st.integers(0, 3),
        residual_blocks=st.integers(0, 3),
    ),
)


def by_enumeration(group: KVGroup, end: int) -> tuple[set[int], set[int]]:
    """(open, sealed) blocks that queries from `end` on read so, now or ever."""
    kv, queries = group.config, range(end, end + 8 * SIZE)
    filled = range(-(-end // SIZE))

    def sees(b: int, t: int) -> bool:
        return not group.window or (b + 1) * SIZE > t - group.window + 1

    def reads(b: int, sealed: bool) -> bool:
        return any(sees(b, t) and kv.reads_sealed(b, t // SIZE) == sealed for t in queries)

    return {b for b in filled if reads(b, False)}, {b for b in range(end // SIZE) if reads(b, True)}


@given(groups, st.integers(0, 80))
def test_blocks_held_are_those_that_a_later_query_reads(group: KVGroup, end: int) -> None:
    opened, sealed = by_enumeration(group, end)
    num_open, num_sealed = group.blocks_held(end)
    assert num_open == len(opened)
    # Once full, a block is sealed though its window may pass before it is read so.
    assert len(sealed) <= num_sealed
    if not group.window:
        assert num_sealed == len(sealed)


@given(groups, st.integers(1, 80))
def test_blocks_for_tokens_is_exactly_the_peak_of_growing(group: KVGroup, length: int) -> None:
    """Over every way to grow in chunks that don't cross a block's end."""
    peak_open = peak_sealed = 0
    for start in range(length):
        oldest = group.first_block(start)
        for end in range(start + 1, min((start // SIZE + 1) * SIZE, length) + 1):
            kv = group.config
            blocks = range(oldest, -(-end // SIZE))
            before = {b for b in blocks if not kv.reads_sealed(b, start // SIZE)}
            after = {b for b in blocks if not kv.reads_sealed(b, end // SIZE)}
            begun = {b for b in before if b * SIZE < start}
            peak_open = max(peak_open, len(begun | after))
            full = [b for b in blocks if kv.seals and kv.sink_blocks <= b < end // SIZE]
            peak_sealed = max(peak_sealed, len(full))
    assert group.blocks_for_tokens(length) == (peak_open, peak_sealed)


@given(groups, st.integers(1, 80), st.integers(0, 20))
def test_drafts_need_what_they_can_touch(group: KVGroup, length: int, ahead: int) -> None:
    plain, more = group.blocks_for_tokens(length), group.blocks_for_tokens(length, ahead)
    extra = -(-ahead // SIZE)
    assert more == (plain[0] + extra, plain[1] + extra * group.config.seals)


@given(groups, st.integers(0, 200))
def test_a_released_block_lies_before_every_later_window(group: KVGroup, end: int) -> None:
    first = group.first_block(end)
    assert first == 0 if not group.window else first * SIZE <= max(0, end - group.window + 1)
    assert all(first <= group.first_block(t) for t in range(end, end + 20))
