"""The fp8 sealed format: E4M3 codes and a float16 scale per group, against a scalar oracle."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kivi_oracle import E4M3, e4m3, seal_group_e4m3
from qdeploy.errors import UsageError
from qdeploy.kv.kivi import SealedLayout


def layout(heads: int = 2, size: int = 16, dim: int = 64) -> SealedLayout:
    return SealedLayout(
        bits_k=8, bits_v=8, block_size=size, num_kv_heads=heads, head_dim=dim, e4m3=True
    )


def random_kv(form: SealedLayout, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (form.num_kv_heads, form.block_size, form.head_dim)
    channel = torch.randn((form.num_kv_heads, 1, form.head_dim), generator=generator).exp()
    return torch.randn(shape, generator=generator) * channel, torch.randn(
        shape, generator=generator
    )


def test_the_oracle_knows_the_codes_that_torch_has() -> None:
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    assert codes.tolist() == E4M3
    assert (e4m3(1.0625), e4m3(-1.1875), e4m3(1e-9)) == (1.0, -1.25, 0.0)  # ties go to even


@pytest.mark.parametrize("dim", [16, 64, 96, 128])
def test_each_group_equals_an_elementwise_oracle(dim: int) -> None:
    form = layout(size=8, dim=dim)
    k, v = random_kv(form)
    got_k, got_v = form.unseal(form.seal(k, v))
    group = 64 if dim % 64 == 0 else dim
    for head in range(form.num_kv_heads):
        for channel in range(dim):
            expected = seal_group_e4m3(k[head, :, channel].numpy())
            np.testing.assert_array_equal(got_k[head, :, channel].numpy(), expected)
        for token in range(form.block_size):
            for start in range(0, dim, group):
                span = slice(start, start + group)
                expected = seal_group_e4m3(v[head, token, span].numpy())
                np.testing.assert_array_equal(got_v[head, token, span].numpy(), expected)


def test_bytes_are_codes_then_scales_of_k_then_of_v() -> None:
    form = layout(heads=1, size=8, dim=16)
    k = torch.ones(1, 8, 16)
    packed = form.seal(k, -k)
    assert packed.numel() == form.num_bytes == 8 * 16 + 16 * 2 + 8 * 16 + 8 * 2
    k_codes, k_scales, v_codes, v_scales = packed.split(form.sizes)
    assert set(k_codes.tolist()) == {0x7E}  # 448, the largest
    assert set(v_codes.tolist()) == {0xFE}
    scales = torch.cat((k_scales, v_scales)).view(torch.float16)
    assert ((scales.float() >= 1 / 448) & (scales.float() <= 1 / 448 * (1 + 2**-9))).all()


def test_bits_per_element_include_scales() -> None:
    form = layout(size=64)
    elements = 2 * form.num_kv_heads * 64 * form.head_dim
    assert form.seal(*random_kv(form)).numel() * 8 / elements == 8.25


@given(scale=st.floats(1e-4, 6e4), seed=st.integers(0, 99))
@settings(max_examples=80, deadline=None)
def test_the_error_is_half_a_step_at_any_magnitude(scale: float, seed: int) -> None:
    form = layout(heads=1, size=8, dim=16)
    x = (torch.rand((1, 8, 16), generator=torch.Generator().manual_seed(seed)) * 2 - 1) * scale
    for got, dim in zip(form.unseal(form.seal(x, x)), (1, 2), strict=True):
        # 3 bits of mantissa; below 2^-6 of code the steps are equal; then a scale's own step
        smallest = x.abs().amax(dim, keepdim=True) / 448 * 2**-10
        assert ((got - x).abs() <= x.abs() * 2**-4 + smallest * 1.01 + 2**-33).all()


def test_zeros_stay_zeros() -> None:
    form = layout(heads=1, size=8, dim=16)
    zeros = torch.zeros(1, 8, 16)
    for got in form.unseal(form.seal(zeros, zeros)):
        assert (got == 0).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e6, -65504.0])
def test_what_float16_cannot_hold_comes_back_as_nan(bad: float) -> None:
    form = layout()
    k, v = random_kv(form)
    k[1, 3, 5] = v[0, 2, 7] = bad
    got_k, got_v = form.unseal(form.seal(k, v))
    assert got_k[1, :, 5].isnan().all()
    assert got_v[0, 2].isnan().all()
    # its group only: neighbours are other channels, tokens and requests
    assert got_k.isnan().sum() == form.block_size
    assert got_v.isnan().sum() == form.value_group


def test_blocks_sealed_together_equal_blocks_sealed_alone() -> None:
    form = layout()
    pairs = [random_kv(form, seed) for seed in range(3)]
    together = form.seal(torch.stack([k for k, _ in pairs]), torch.stack([v for _, v in pairs]))
    for packed, (k, v) in zip(together, pairs, strict=True):
        assert torch.equal(packed, form.seal(k, v))
    k, v = form.unseal(together)
    assert torch.equal(k[1], form.unseal(together[1])[0])
    assert torch.equal(v[2], form.unseal(together[2])[1])


def test_float8_of_other_widths_is_refused() -> None:
    with pytest.raises(UsageError, match="float8 codes have 8 bits"):
        SealedLayout(bits_k=8, bits_v=4, block_size=8, num_kv_heads=1, head_dim=16, e4m3=True)
