"""Scales and codes refined by the whole output error: exact, and never worse."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from qdeploy.quantization.numerics import dequantize
from qdeploy.quantization.refine import move_codes, refit_scales
from qdeploy.quantization.rtn import rtn_quantize
from qdeploy.quantization.scheme import QuantizedLinear, QuantScheme


def problem(rows: int, columns: int, seed: int) -> tuple[Tensor, Tensor]:
    """A weight and the moments of inputs that are correlated across groups."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    mix = torch.randn(columns, columns, generator=generator) + 2 * torch.eye(columns)
    inputs = torch.randn(200, columns, generator=generator) @ mix
    return weight, inputs.t() @ inputs / len(inputs)


def errors(weight: Tensor, hessian: Tensor, quantized: Tensor) -> Tensor:
    """Of each row, float64."""
    error = (quantized - weight).double()
    return ((error @ hessian.double()) * error).sum(1)


def rounded(weight: Tensor, bits: int, symmetric: bool) -> QuantizedLinear:
    scheme = QuantScheme(bits=bits, group_size=8, symmetric=symmetric)
    return rtn_quantize(weight, scheme)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_scales_are_the_least_squares_ones(seed: int, symmetric: bool) -> None:
    weight, hessian = problem(6, 32, seed)
    q = rounded(weight, 4, symmetric)
    scales = refit_scales(weight, hessian, q.codes, q.scales.float(), q.zero_points)
    root = torch.linalg.cholesky(hessian.double()).t()
    for row in range(6):
        steps = (q.codes[row].double() - q.zero_points[row].double().repeat_interleave(8)).view(
            4, 8
        )
        spread = torch.block_diag(*steps.unsqueeze(1))  # [4, 32]: the part of each group
        best = torch.linalg.lstsq(root @ spread.t(), root @ weight[row].double()).solution
        torch.testing.assert_close(scales[row].double(), best, rtol=2e-3, atol=0)


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("seed", range(4))
def test_neither_step_raises_any_rows_error(seed: int, bits: int) -> None:
    weight, hessian = problem(16, 64, seed)
    q = rounded(weight, bits, symmetric=bool(seed % 2))
    codes, scales, zeros = q.codes, q.scales.float(), q.zero_points
    before = errors(weight, hessian, q.dequantize())
    for _ in range(2):
        scales = refit_scales(weight, hessian, codes, scales, zeros)
        after = errors(weight, hessian, dequantize(codes, scales, zeros))
        assert (after <= before * (1 + 1e-3)).all()  # float16 scales
        codes = move_codes(weight, hessian, codes, scales, zeros, q.scheme)
        moved = errors(weight, hessian, dequantize(codes, scales, zeros))
        assert (moved <= after * (1 + 1e-5)).all()
        before = moved
    assert before.sum() < 0.8 * errors(weight, hessian, q.dequantize()).sum()
    assert codes.max() <= q.scheme.max_code


def test_moved_codes_end_where_no_single_code_is_better() -> None:
    weight, hessian = problem(4, 16, 0)
    q = rounded(weight, 2, symmetric=False)
    codes, scales = q.codes, q.scales.float()
    for _ in range(20):
        codes = move_codes(weight, hessian, codes, scales, q.zero_points, q.scheme)
    best = errors(weight, hessian, dequantize(codes, scales, q.zero_points))
    for column, code in itertools.product(range(16), range(4)):
        tried = codes.clone()
        tried[:, column] = code
        error = errors(weight, hessian, dequantize(tried, scales, q.zero_points))
        assert (error >= best * (1 - 1e-5)).all()


def test_blocks_of_columns_see_each_others_moves() -> None:
    """Wider than a block: with a dense H the second block must know what the first one did."""
    weight, hessian = problem(4, 192, 3)
    q = rounded(weight, 3, symmetric=False)
    codes = move_codes(weight, hessian, q.codes, q.scales.float(), q.zero_points, q.scheme)
    moved = errors(weight, hessian, dequantize(codes, q.scales, q.zero_points))
    assert (moved <= errors(weight, hessian, q.dequantize())).all()


def test_a_group_of_zero_codes_keeps_its_scale() -> None:
    weight, hessian = problem(3, 16, 1)
    weight[:, :8] = 0
    q = rounded(weight, 4, symmetric=False)
    scales = refit_scales(weight, hessian, q.codes, q.scales.float(), q.zero_points)
    torch.testing.assert_close(scales[:, 0], q.scales[:, 0].float())
    assert scales.isfinite().all()


def test_inputs_are_left_alone_and_scales_are_exact_in_float16() -> None:
    weight, hessian = problem(5, 32, 2)
    q = rounded(weight, 4, symmetric=True)
    kept = [tensor.clone() for tensor in (weight, hessian, q.codes, q.scales)]
    scales = refit_scales(weight, hessian, q.codes, q.scales.float(), q.zero_points)
    move_codes(weight, hessian, q.codes, scales, q.zero_points, q.scheme)
    for tensor, before in zip((weight, hessian, q.codes, q.scales), kept, strict=True):
        assert torch.equal(tensor, before)
    assert torch.equal(scales, scales.half().float())
