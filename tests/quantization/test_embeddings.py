"""Token tables in few bits: small error, the same bits anywhere, safe at any magnitude."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qdeploy.errors import UsageError
from qdeploy.quantization.embeddings import quantize_table, table_bytes, table_scheme
from qdeploy.quantization.rtn import rtn_quantize
from qdeploy.quantization.scheme import QuantizedLinear, QuantScheme

FOUR = QuantScheme(bits=4, group_size=64, symmetric=True)
EIGHT = QuantScheme(bits=8, group_size=64, symmetric=True)


def table(rows: int = 40, hidden: int = 128, seed: int = 0) -> Tensor:
    return torch.randn(rows, hidden, generator=torch.Generator().manual_seed(seed))


def squared_error(q: QuantizedLinear, weight: Tensor) -> float:
    return (q.dequantize() - weight).square().sum().item()


def test_four_bits_beat_plain_rounding() -> None:
    weight = table(200)
    searched = squared_error(quantize_table(weight, FOUR), weight)
    assert searched < 0.8 * squared_error(rtn_quantize(weight, FOUR), weight)


def test_four_bits_are_close_to_the_best_scale_there_is() -> None:
    weight = table(8, 64)
    best = torch.full((8,), float("inf"))
    for magnitude in torch.linspace(0.1, 0.8, 300):
        for scale in (magnitude, -magnitude):
            codes = (weight / scale).round().clamp(-8, 7)
            best = torch.minimum(best, (codes * scale - weight).square().sum(1))
    found = (quantize_table(weight, FOUR).dequantize() - weight).square().sum(1)
    assert (found <= 1.08 * best).all()
    assert found.sum() <= 1.03 * best.sum()


@pytest.mark.parametrize(
    "scheme", [EIGHT, QuantScheme(bits=4, group_size=32), QuantScheme(bits=8, group_size=16)]
)
def test_other_schemes_are_plain_rounding(scheme: QuantScheme) -> None:
    weight = table(300)  # several pieces
    found, expected = quantize_table(weight, scheme), rtn_quantize(weight, scheme)
    for name in ("codes", "scales", "zero_points"):
        assert torch.equal(getattr(found, name), getattr(expected, name))


@pytest.mark.parametrize("scheme", [FOUR, EIGHT])
def test_a_row_is_rounded_alike_whatever_is_around_it(scheme: QuantScheme) -> None:
    weight = table(1000, 64)
    threads = torch.get_num_threads()
    whole = quantize_table(weight, scheme)
    try:
        torch.set_num_threads(3)
        again = quantize_table(weight, scheme)
    finally:
        torch.set_num_threads(threads)
    part = quantize_table(weight[611:633], scheme)
    for name in ("codes", "scales"):
        assert torch.equal(getattr(again, name), getattr(whole, name))
        assert torch.equal(getattr(part, name), getattr(whole, name)[611:633])


def test_the_arithmetic_is_frozen() -> None:
    """Another result means other weights than those that artifacts were measured with."""
    steps = torch.arange(96 * 64, dtype=torch.int64).view(96, 64) * 7919 % 2003 - 1001
    weight = (steps.float() / 1024) ** 3
    digest = hashlib.sha256()
    for scheme in (FOUR, EIGHT):
        q = quantize_table(weight, scheme)
        digest.update(q.codes.numpy().tobytes() + q.scales.numpy().tobytes())
    assert digest.hexdigest()[:16] == "62f30dfd2c5b1dcc"


def test_any_stored_dtype_gives_the_codes_of_its_values() -> None:
    weight = table().bfloat16()
    assert torch.equal(
        quantize_table(weight, FOUR).codes, quantize_table(weight.float(), FOUR).codes
    )


@given(exponent=st.integers(-40, 15), bits=st.sampled_from([4, 8]), seed=st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_any_magnitude_is_safe(exponent: int, bits: int, seed: int) -> None:
    weight = table(4, 64, seed) * 2.0**exponent
    weight[1] = 0
    weight[2, :32] = weight[2, 0]
    q = quantize_table(weight, FOUR if bits == 4 else EIGHT)
    assert q.scales.isfinite().all()
    assert (q.scales != 0).all()
    assert (q.dequantize()[1] == 0).all()
    error = (q.dequantize() - weight).abs().max()
    assert error <= weight.abs().max() / (1 << (bits - 2)) + 2**-15


@pytest.mark.parametrize(("hidden", "group"), [(576, 64), (640, 64), (96, 32), (48, 16), (24, 8)])
def test_the_largest_group_that_divides_is_taken(hidden: int, group: int) -> None:
    scheme = table_scheme(4, hidden)
    assert (scheme.bits, scheme.group_size, scheme.symmetric) == (4, group, True)
    q = quantize_table(table(5, hidden), scheme)
    assert q.scales.shape == (5, hidden // group)
    assert table_bytes((5, hidden), scheme) == 5 * (hidden // 2 + hidden // group * 2)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match="quantize_embeddings=3"):
        table_scheme(3, 64)
    with pytest.raises(UsageError, match="hidden size that 8 divides, this model has 60"):
        table_scheme(4, 60)
