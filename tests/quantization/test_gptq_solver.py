"""GPTQ on matrices: the reference, groups, act-order, dampening, dead columns."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qdeploy.quantization.gptq import gptq_quantize
from qdeploy.quantization.hessian import BAND, DAMPENING, Hessian, InputStatistics, dampened
from qdeploy.quantization.numerics import dequantize
from qdeploy.quantization.rounding import Rounded
from qdeploy.quantization.rtn import rtn_quantize
from qdeploy.quantization.scheme import QuantScheme
from quantization.gptq_reference import reference_gptq

SCHEME = QuantScheme(bits=4, group_size=64)


def problem(rows: int = 64, columns: int = 256, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A random weight, and the moments of correlated inputs whose features differ in size."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * 0.1
    mix = torch.randn(columns, columns, generator=generator) / columns**0.5 + torch.eye(columns)
    sizes = torch.rand(columns, generator=generator).mul(3).exp()
    inputs = torch.randn(1000, columns, generator=generator) @ mix * sizes
    return weight, inputs.t() @ inputs / len(inputs)


def weight_of(result: Rounded) -> Tensor:
    return dequantize(result.codes, result.scales, result.zero_points)


def output_error(weight: Tensor, hessian: Tensor, quantized: Tensor) -> float:
    error = (quantized - weight).double()
    return ((error @ hessian.double()) * error).sum().item()


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("seed", [0, 1])
def test_q17_equals_the_reference_with_local_and_global_columns(group_size: int, seed: int) -> None:
    weight, hessian = problem(seed=seed)
    scheme = QuantScheme(bits=4, group_size=group_size)
    result = gptq_quantize(weight, hessian, scheme, order="none", search=False, rounds=0)
    assert result.dampening == DAMPENING
    expected, scales, zeros = reference_gptq(weight, hessian, 4, group_size, DAMPENING)
    # A float32 rounding that falls on the other side of .5 moves one code: none does here.
    torch.testing.assert_close(result.scales.double(), scales, atol=1e-5, rtol=0)
    assert torch.equal(result.zero_points.double(), zeros)
    torch.testing.assert_close(weight_of(result).double(), expected, atol=1e-5, rtol=0)


def test_a_block_of_columns_is_not_a_group() -> None:
    """Groups larger and smaller than the lazy-update block, and one that is not a power of two."""
    weight, hessian = problem(columns=192)
    for group_size in (16, 48, 96, 192, -1):
        scheme = QuantScheme(bits=4, group_size=group_size)
        size = 192 if group_size == -1 else group_size
        result = gptq_quantize(weight, hessian, scheme, order="none", search=False, rounds=0)
        expected, _, _ = reference_gptq(weight, hessian, 4, size, DAMPENING)
        difference = (weight_of(result).double() - expected).abs() > 1e-5
        assert difference.float().mean() < 1e-3, group_size


@pytest.mark.parametrize("order", ["none", "group", "static"])
@pytest.mark.parametrize("symmetric", [False, True])
def test_beats_rounding_to_nearest(order: str, symmetric: bool) -> None:
    weight, hessian = problem()
    scheme = QuantScheme(bits=4, group_size=64, symmetric=symmetric)
    result = gptq_quantize(weight, hessian, scheme, order=order)  # type: ignore[arg-type]
    ours = output_error(weight, hessian, weight_of(result))
    nearest = output_error(weight, hessian, rtn_quantize(weight, scheme).dequantize())
    assert ours < 0.8 * nearest
    if symmetric:
        assert (result.zero_points == 8).all()


def test_act_order_and_search_help_on_skewed_inputs() -> None:
    weight, hessian = problem()

    def error(order: str, search: bool, rounds: int) -> float:
        result = gptq_quantize(weight, hessian, SCHEME, order=order, search=search, rounds=rounds)  # type: ignore[arg-type]
        return output_error(weight, hessian, weight_of(result))

    plain = error("none", False, 0)
    assert error("static", False, 0) < plain
    assert error("static", True, 0) < error("static", False, 0)
    assert error("group", True, 0) < plain
    assert error("group", True, 2) < error("group", True, 1) < error("group", True, 0)


def test_groups_on_disk_are_in_input_order_with_act_order() -> None:
    """Codes, scales and zero points dequantize without a g_idx to nearly the weight."""
    weight, hessian = problem()
    result = gptq_quantize(weight, hessian, SCHEME, order="static")
    assert (weight_of(result) - weight).abs().max() < 0.2
    assert result.codes.max() <= 15


def test_scales_are_exact_in_float16() -> None:
    weight, hessian = problem()
    result = gptq_quantize(weight, hessian, SCHEME)
    assert torch.equal(result.scales.half().float(), result.scales)


def test_q16_dampening_escalates_on_a_singular_hessian() -> None:
    """Far fewer tokens than features, and outliers: rank 3 of 256."""
    weight, _ = problem()
    inputs = torch.randn(3, 256, generator=torch.Generator().manual_seed(0)) * 1e4
    hessian = inputs.t() @ inputs
    hessian -= torch.eye(256) * hessian.diagonal().mean() * 0.03  # rounding, made large
    result = gptq_quantize(weight, hessian, SCHEME)
    assert result.dampening is not None
    assert result.dampening > DAMPENING
    assert weight_of(result).isfinite().all()


def test_dampening_leaves_unseen_features_out_of_the_mean() -> None:
    hessian = torch.diag(torch.tensor([4.0, 0.0, 2.0]))
    expected = torch.diag(torch.tensor([4.03, 3.0, 2.03]))
    torch.testing.assert_close(dampened(hessian, 0.01), expected)
    assert torch.equal(dampened(torch.zeros(2, 2)), torch.eye(2))
    assert hessian[1, 1] == 0


def test_no_factor_at_all_falls_back_to_rounding() -> None:
    weight, hessian = problem()
    hessian[3, 5] = hessian[5, 3] = float("nan")
    result = gptq_quantize(weight, hessian, SCHEME, search=False)
    assert (result.dampening, result.fallback) == (None, "rtn")
    assert torch.equal(result.codes, rtn_quantize(weight, SCHEME).codes)


def test_dead_columns_keep_their_weights() -> None:
    weight, hessian = problem()
    dead = torch.tensor([0, 70, 255])
    hessian[dead] = 0
    hessian[:, dead] = 0
    result = gptq_quantize(weight, hessian, SCHEME)
    kept = weight_of(result)[:, dead]
    assert (kept - weight[:, dead]).abs().mean() < 0.2 * weight[:, dead].abs().mean()
    assert weight_of(result).isfinite().all()


def test_inputs_are_left_alone_and_the_result_is_deterministic() -> None:
    weight, hessian = problem()
    before = weight.clone(), hessian.clone()
    first, second = (gptq_quantize(weight, hessian, SCHEME) for _ in range(2))
    assert torch.equal(weight, before[0])
    assert torch.equal(hessian, before[1])
    assert torch.equal(first.codes, second.codes)


def test_q08_hessian_is_the_sum_over_real_tokens() -> None:
    inputs = torch.randn(6, 8)
    hessian = Hessian()
    hessian(inputs[:5].view(1, 5, 8))
    hessian(inputs[5:])  # a single token keeps its dimension
    assert hessian.rows == 6
    torch.testing.assert_close(hessian.matrix, inputs.t() @ inputs / 6)


def test_h_is_summed_in_bands_and_made_symmetric() -> None:
    """Wider than a band; what lies left of the diagonal is mirrored."""
    inputs = torch.randn(7, BAND + 40)
    hessian = Hessian()
    hessian(inputs[:3])
    hessian(inputs[3:])
    matrix = hessian.matrix
    torch.testing.assert_close(matrix, inputs.t() @ inputs / 7)
    assert torch.equal(matrix, matrix.t())


def test_absolute_mean_is_over_all_tokens() -> None:
    inputs = torch.randn(7, 12)
    means = InputStatistics()
    means(inputs[:3])
    means(inputs[3:].view(1, 4, 12))
    torch.testing.assert_close(means.absolute_mean, inputs.abs().mean(0))


def test_statistics_of_nothing_are_an_error() -> None:
    with pytest.raises(ValueError, match="no rows"):
        _ = Hessian().matrix
    with pytest.raises(ValueError, match="no rows"):
        _ = InputStatistics().absolute_mean
