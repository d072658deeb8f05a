from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdeploy.errors import CapacityError, UsageError
from qdeploy.kv.config import KVCacheConfig
from qdeploy.kv.groups import KVGroup, KVPoolSize, kv_groups
from qdeploy.kv.pool import open_block_bytes, sealed_block_bytes
from qdeploy.models.spec import DecoderSpec, spec_from_config
from qdeploy.runtime.kv_budget import KVBudget, plan_kv_pools, sequences_held

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


SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 1e5,
}
GEMMA3_270M = {
    "architectures": ["Gemma3ForCausalLM"],
    "vocab_size": 262144,
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 256,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}


def bytes_of(spec: DecoderSpec, groups: Sequence[KVGroup]) -> tuple[list[int], list[int]]:
    """Of open and sealed blocks, as the cpu backend keeps them: open ones in bfloat16."""
    return (
        [open_block_bytes(spec, group, itemsize=2) for group in groups],
        [sealed_block_bytes(spec, group) for group in groups],
    )


def held(config: dict[str, Any], dtype: str, num_tokens: int, *, windows: bool = True) -> int:
    spec, kv = spec_from_config(config), KVCacheConfig(dtype=dtype)
    groups = kv_groups(spec, kv)
    if not windows:
        groups = (KVGroup(layers=tuple(range(spec.num_layers)), config=kv),)
    sizes = bytes_of(spec, groups)
    return sequences_held(groups, *sizes, num_bytes=8 << 30, num_tokens=num_tokens)


@pytest.mark.parametrize(
    ("dtype", "num_tokens", "least"),
    [
        ("int8", 1024, 1.65),
        ("int8", 4096, 1.8),
        ("int4", 1024, 2.6),
        ("int4", 4096, 3.2),
    ],
)
def test_sequences_in_the_memory_of_bf16(dtype: str, num_tokens: int, least: float) -> None:
    """Whether the last block is full or half empty; sinks and tails included."""
    for length in (num_tokens, num_tokens + 32):
        assert held(SMOLLM2, dtype, length) >= least * held(SMOLLM2, "bf16", length)


@pytest.mark.parametrize("dtype", ["bf16", "int4"])
def test_windows_of_512_tokens_hold_more_sequences(dtype: str) -> None:
    """15 of gemma-3-270m's 18 layers keep a window only."""
    for num_tokens, least in ((1024, 1.6), (4096, 3.2), (32768, 5)):
        with_windows = held(GEMMA3_270M, dtype, num_tokens)
        assert with_windows >= least * held(GEMMA3_270M, dtype, num_tokens, windows=False)


def test_windowed_pools_stop_growing() -> None:
    spec = spec_from_config(GEMMA3_270M)
    groups = kv_groups(spec, KVCacheConfig(dtype="int8"))
    assert [(group.window, len(group.layers)) for group in groups] == [(512, 15), (0, 3)]
    options: dict[str, Any] = {"max_num_seqs": 16}
    for length in (1024, 32768):
        pools = plan_kv_pools(groups, *bytes_of(spec, groups), max_model_len=length, **options)
        assert pools[0].num_sealed_blocks == 16 * 9  # ⌈511 / 64⌉ + 1
    with_windows = KVBudget(groups=groups, costs=costs_of(spec, groups), total=0)
    assert with_windows.cost(32768) < 0.23 * held_all(spec, 32768)


def costs_of(spec: DecoderSpec, groups: Sequence[KVGroup]) -> tuple[int, ...]:
    return tuple(cost for pair in zip(*bytes_of(spec, groups), strict=True) for cost in pair)


def held_all(spec: DecoderSpec, num_tokens: int) -> int:
    """Bytes of a sequence if no layer had a window."""
    whole = (KVGroup(layers=tuple(range(18)), config=KVCacheConfig(dtype="int8")),)
    return KVBudget(groups=whole, costs=costs_of(spec, whole), total=0).cost(num_tokens)


several = st.lists(
    st.tuples(
        st.builds(
            KVGroup,
            layers=st.just((0,)),
            window=st.sampled_from([0, 0, 40, 128, 300]),
            config=st.builds(
                KVCacheConfig,
                dtype=st.sampled_from(["bf16", "int8", "int4"]),
                block_size=st.just(32),
                sink_blocks=st.integers(0, 2),
                residual_blocks=st.integers(0, 2),
            ),
        ),
        st.integers(1, 900),
        st.integers(1, 300),
    ),
    min_size=1,
    max_size=3,
)
sizes = st.tuples(st.integers(1, 3000), st.integers(1, 40), st.integers(0, 40))


def budget_of(several: Sequence[tuple[KVGroup, int, int]], total: int, ahead: int) -> KVBudget:
    costs = [(a, b if group.config.seals else 0) for group, a, b in several]
    return KVBudget(
        groups=tuple(group for group, _, _ in several),
        costs=tuple(cost for pair in costs for cost in pair),
        total=total,
        lookahead_tokens=ahead,
    )


@given(several, sizes, st.integers(0, 2_000_000))
def test_a_budget_is_spent_to_the_last_block_that_fits(
    several: list[tuple[KVGroup, int, int]], size: tuple[int, int, int], more: int
) -> None:
    length, seqs, ahead = size
    smallest = budget_of(several, 0, ahead).cost(length)
    budget = budget_of(several, smallest + more, ahead)
    pools = budget.split(length, seqs)
    counts = [n for p in pools for n in (p.num_open_blocks, p.num_sealed_blocks)]
    rest = budget.total - budget.price(counts)
    needs = [n for group, _, _ in several for n in group.blocks_for_tokens(length)]
    assert all(count >= need for count, need in zip(counts, needs, strict=True))
    assert 0 <= rest < min(c for c, need in zip(budget.costs, needs, strict=True) if need)
    seqs_held, each = budget.level(length, seqs)
    per_seq = [n for group, _, _ in several for n in group.blocks_for_tokens(each, ahead)]
    assert all(c >= seqs_held * need for c, need in zip(counts, per_seq, strict=True))


@given(several, sizes, st.integers(0, 2_000_000), st.integers(0, 500_000))
def test_more_memory_never_holds_fewer_or_shorter_sequences(
    several: list[tuple[KVGroup, int, int]], size: tuple[int, int, int], total: int, more: int
) -> None:
    length, seqs, ahead = size
    small, large = (budget_of(several, n, ahead) for n in (total, total + more))
    assert small.level(length, seqs) <= large.level(length, seqs)
    assert small.longest(length) <= large.longest(length)


def test_drafts_get_open_blocks_of_their_own() -> None:
    options = {"max_num_seqs": 8, "kv_cache_memory_bytes": 10_000_000, "max_model_len": 2048}
    plain, drafting = plan(**options), plan(**options, lookahead_tokens=5)
    assert drafting.num_open_blocks > plain.num_open_blocks
    assert drafting.num_sealed_blocks < plain.num_sealed_blocks


def test_few_blocks_are_not_all_open() -> None:
    """256 sequences can't have 2 open blocks each and grow; fewer of 512 tokens can."""
    pools = plan(max_num_seqs=256, max_model_len=8192, kv_cache_memory_bytes=256 * 2 * OPEN)
    assert pools.num_sealed_blocks > 2 * pools.num_open_blocks
