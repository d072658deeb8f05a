"""What a policy does to attention: the trial against the executor's rule, one query at a time."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from qdeploy.errors import UsageError
from qdeploy.kv.config import KVCacheConfig
from qdeploy.kv.kivi import BITS, SealedLayout
from qdeploy.kv.trial import AttentionCall, TrialError, attend, try_policy

HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 16, 8


def make_call(tokens: int, *, window: int = 0, seed: int = 0) -> AttentionCall:
    generator = torch.Generator().manual_seed(seed)

    def draw(heads: int) -> Tensor:
        return torch.randn(2, heads, tokens, DIM, generator=generator) * 2

    mask = None
    if window:
        distance = torch.arange(tokens)[:, None] - torch.arange(tokens)[None, :]
        mask = ((distance >= 0) & (distance < window)).expand(2, 1, -1, -1)
    q, k, v = draw(HEADS), draw(KV_HEADS), draw(KV_HEADS)
    return AttentionCall(q=q, k=k, v=v, mask=mask, scale=DIM**-0.5)


def measure(call: AttentionCall, config: KVCacheConfig, total: TrialError) -> None:
    exact = attend(call, call.k, call.v, 0, call.q.shape[2])
    try_policy(call, exact, config, total)


def one_query(call: AttentionCall, row: int, head: int, t: int, config: KVCacheConfig) -> Tensor:
    """Attention of one query, each block read as `reads_sealed` says: no code of `trial`."""
    bits = BITS.get(config.dtype, (8, 8))
    layout = SealedLayout(
        bits_k=bits[0], bits_v=bits[1], block_size=BLOCK, num_kv_heads=KV_HEADS, head_dim=DIM
    )
    keys, values = [], []
    for block in range(t // BLOCK + 1):
        rows = slice(block * BLOCK, min((block + 1) * BLOCK, t + 1))
        k, v = call.k[row, :, rows], call.v[row, :, rows]
        if config.reads_sealed(block, t // BLOCK):
            k, v = layout.unseal(layout.seal(k, v))
        keys.append(k[head // 2])
        values.append(v[head // 2])
    scores = torch.cat(keys) @ call.q[row, head, t] * call.scale
    if call.mask is not None:
        scores = scores.masked_fill(~call.mask[row, 0, t, : t + 1], -math.inf)
    return scores.softmax(0) @ torch.cat(values)


@pytest.mark.parametrize("window", [0, 11])
@pytest.mark.parametrize(("sinks", "residual"), [(0, 0), (1, 0), (1, 1), (2, 1)])
@pytest.mark.parametrize("dtype", ["int4", "k8v4"])
def test_the_error_is_that_of_every_query_by_the_position_rule(
    dtype: str, sinks: int, residual: int, window: int
) -> None:
    call, tokens = make_call(37, window=window), 37
    config = KVCacheConfig(
        dtype=dtype, block_size=BLOCK, sink_blocks=sinks, residual_blocks=residual
    )
    total = TrialError()
    measure(call, config, total)
    error = norm = 0.0
    first = (sinks + residual + 1) * BLOCK
    for t in range(first, tokens):
        for row in range(2):
            for head in range(HEADS):
                exact = one_query(call, row, head, t, config.with_dtype("bf16"))
                error += (one_query(call, row, head, t, config) - exact).square().sum().item()
                norm += exact.square().sum().item()
    assert total.queries == 2 * (tokens - first)
    assert total.error == pytest.approx(error, rel=1e-4)
    assert total.norm == pytest.approx(norm, rel=1e-4)
    assert total.relative == pytest.approx((error / norm) ** 0.5, rel=1e-4)


def test_calls_add_up_and_short_ones_say_nothing() -> None:
    config, total, twice = KVCacheConfig(dtype="int4", block_size=BLOCK), TrialError(), TrialError()
    measure(make_call(2 * BLOCK), config, total)
    assert total.queries == 0
    assert math.isnan(total.relative)
    call = make_call(40)
    measure(call, config, total)
    for _ in range(2):
        measure(call, config, twice)
    assert twice.queries == 2 * total.queries
    assert twice.relative == pytest.approx(total.relative)


def test_the_call_is_left_as_it_was() -> None:
    call = make_call(40)
    before = call.k.clone(), call.v.clone()
    measure(call, KVCacheConfig(dtype="int4", block_size=BLOCK), TrialError())
    assert torch.equal(call.k, before[0])
    assert torch.equal(call.v, before[1])
    assert attend(call, call.k, call.v, 0, 40).shape == call.q.shape


def test_more_bits_lose_less_and_zeros_lose_nothing() -> None:
    call, errors = make_call(64), {}
    for dtype in ("int4", "k8v4", "int8"):
        total = TrialError()
        measure(call, KVCacheConfig(dtype=dtype, block_size=BLOCK), total)
        errors[dtype] = total.relative
    assert errors["int4"] > errors["k8v4"] > 4 * errors["int8"] > 0
    silent = AttentionCall(q=call.q, k=call.k, v=torch.zeros_like(call.v), mask=None, scale=1)
    total = TrialError()
    measure(silent, KVCacheConfig(dtype="int4", block_size=BLOCK), total)
    assert total.relative == 0


def test_keys_and_values_of_other_sizes_are_refused() -> None:
    call = make_call(8)
    with pytest.raises(UsageError, match="bf16"):
        AttentionCall(q=call.q, k=call.k, v=call.v[..., :8], mask=None, scale=1)
