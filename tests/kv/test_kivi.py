"""The sealed format: real bytes, whole groups, an oracle per bit width, hostile values."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kivi_oracle import seal_group
from qdeploy.errors import UsageError
from qdeploy.kv.kivi import BITS, SealedLayout

WIDTHS = sorted(set(BITS.values()))


def layout(bits: tuple[int, int], heads: int = 2, size: int = 16, dim: int = 64) -> SealedLayout:
    return SealedLayout(
        bits_k=bits[0], bits_v=bits[1], block_size=size, num_kv_heads=heads, head_dim=dim
    )


def random_kv(form: SealedLayout, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Keys with large offsets per channel, as key biases make them; values around zero."""
    generator = torch.Generator().manual_seed(seed)
    shape = (form.num_kv_heads, form.block_size, form.head_dim)
    k = torch.randn(shape, generator=generator) + 50 * torch.randn(
        (form.num_kv_heads, 1, form.head_dim), generator=generator
    )
    return k, torch.randn(shape, generator=generator)


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("dim", [16, 64, 96, 128])
def test_x12_each_width_equals_an_elementwise_oracle(bits: tuple[int, int], dim: int) -> None:
    form = layout(bits, dim=dim)
    k, v = random_kv(form)
    got_k, got_v = form.unseal(form.seal(k, v))
    group = 64 if dim % 64 == 0 else dim
    for head in range(form.num_kv_heads):
        for channel in range(dim):
            expected = seal_group(k[head, :, channel].numpy(), bits[0])
            np.testing.assert_allclose(got_k[head, :, channel].numpy(), expected, atol=1e-4)
        for token in range(form.block_size):
            for start in range(0, dim, group):
                span = slice(start, start + group)
                expected = seal_group(v[head, token, span].numpy(), bits[1])
                np.testing.assert_allclose(got_v[head, token, span].numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("bits", WIDTHS)
def test_x12_the_error_is_half_a_code(bits: tuple[int, int]) -> None:
    form = layout(bits)
    k, v = (x.double() for x in random_kv(form))
    got_k, got_v = form.unseal(form.seal(k.float(), v.float()))
    for x, got, dim, width in ((k, got_k, 1, bits[0]), (v, got_v, 2, bits[1])):
        span = x.amax(dim, keepdim=True) - x.amin(dim, keepdim=True)
        offset = x.abs().amax(dim, keepdim=True) * 2**-10  # rounding of the stored minimum
        step = (span + offset) / (2**width - 1)
        assert ((got - x).abs() <= 0.502 * step + 1e-6 * x.abs() + 1e-7).all()


def test_x12_an_unknown_width_is_refused() -> None:
    with pytest.raises(UsageError, match="KV bits=2"):
        layout((2, 4))


@pytest.mark.parametrize(("name", "most"), [("int8", 8.6), ("k8v4", 6.6), ("int4", 4.6)])
def test_x11_bits_per_element_include_scales(name: str, most: float) -> None:
    form = layout(BITS[name], size=64)
    packed = form.seal(*random_kv(form))
    assert packed.dtype == torch.uint8
    assert packed.numel() == form.num_bytes
    assert packed.numel() * 8 / (2 * form.num_kv_heads * 64 * form.head_dim) <= most
    if name == "int4":
        assert packed.numel() <= 0.32 * 2 * 2 * form.num_kv_heads * 64 * form.head_dim


def test_four_bit_codes_lie_two_in_a_byte_the_even_channel_low() -> None:
    form = layout((4, 4), heads=1, size=8, dim=16)
    k = torch.arange(8.0)[:, None].repeat(1, 16)[None]
    k[..., 1::2] = 7 - k[..., 1::2]  # odd channels count down
    codes = form.seal(k, torch.zeros_like(k))[: 8 * 16 // 2].view(8, 8)
    assert (codes & 15)[:, 0].tolist()[0] == 0
    assert (codes >> 4)[:, 0].tolist()[0] == 15
    assert (codes & 15)[:, 0].tolist()[7] == 15
    assert (codes >> 4)[:, 0].tolist()[7] == 0


@given(
    value=st.floats(-60000, 60000, width=32, allow_subnormal=False), bits=st.sampled_from(WIDTHS)
)
@settings(max_examples=200, deadline=None)
def test_a_constant_block_is_safe(value: float, bits: tuple[int, int]) -> None:
    form = layout(bits, heads=1, size=8, dim=16)
    constant = torch.full((1, 8, 16), value)
    for got in form.unseal(form.seal(constant, constant)):
        assert torch.isfinite(got).all()
        assert (got - constant).abs().max() <= abs(value) * 2e-5 + 2**-23


@given(scale=st.floats(1e-5, 3e4), bits=st.sampled_from(WIDTHS), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_no_value_is_clipped_at_any_magnitude(
    scale: float, bits: tuple[int, int], seed: int
) -> None:
    form = layout(bits, heads=1, size=8, dim=16)
    x = torch.rand((1, 8, 16), generator=torch.Generator().manual_seed(seed)) * scale
    for got, width in zip(form.unseal(form.seal(x, x)), bits, strict=True):
        # a stored scale lies up to 2^-24 above the exact one: float16 has no finer steps
        step = scale * (1 + 2**-9) / (2**width - 1) + 2 * 2**-24
        assert (got - x).abs().max() <= 0.51 * step + 1e-6 * scale


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e6])
@pytest.mark.parametrize("bits", WIDTHS)
def test_what_float16_cannot_hold_comes_back_as_nan(bad: float, bits: tuple[int, int]) -> None:
    form = layout(bits)
    k, v = random_kv(form)
    k[1, 3, 5] = v[0, 2, 7] = bad
    got_k, got_v = form.unseal(form.seal(k, v))
    assert got_k[1, :, 5].isnan().all()
    assert got_v[0, 2].isnan().all()
    # its group only: neighbours are other channels, tokens and requests
    assert got_k.isnan().sum() == form.block_size
    assert got_v.isnan().sum() == form.value_group


def test_x11_blocks_sealed_together_equal_blocks_sealed_alone() -> None:
    form = layout((4, 4))
    pairs = [random_kv(form, seed) for seed in range(3)]
    together = form.seal(torch.stack([k for k, _ in pairs]), torch.stack([v for _, v in pairs]))
    for packed, (k, v) in zip(together, pairs, strict=True):
        assert torch.equal(packed, form.seal(k, v))
    k, v = form.unseal(together)
    assert torch.equal(k[1], form.unseal(together[1])[0])
    assert torch.equal(v[2], form.unseal(together[2])[1])
