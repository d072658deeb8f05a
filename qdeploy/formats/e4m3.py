"""Layers of float8 weights (e4m3fn) with a grid of scales, as the FP8 formats have them."""

from __future__ import annotations

import torch
from torch import Tensor

from qdeploy.errors import FormatError, UsageError
from qdeploy.formats.weight_format import Shape, check_scales, expect_dtype
from qdeploy.quantization.fp8 import short_last_group
from qdeploy.quantization.scheme import QuantizedLinear, QuantScheme

#: Exponents alone (E8M0), which some writers store as bytes.
_EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)


def grid_shape(scheme: QuantScheme, out_features: int, in_features: int) -> tuple[int, int]:
    """Scales of a layer: one for each block, the last ones of which may be smaller."""
    rows, columns = scheme.block(out_features, in_features)
    return -(-out_features // rows), -(-in_features // columns)


def require_whole_blocks(scheme: QuantScheme, out_features: int, in_features: int) -> None:
    """Raise UsageError for a layer that isn't made of whole blocks: other readers refuse it."""
    rows, columns = max(scheme.block_rows, 1), max(scheme.group_size, 1)  # −1 fits any layer
    if out_features % rows or in_features % columns:
        raise UsageError(
            f"{scheme.name} needs multiples of {rows} × {columns}, this layer is "
            f"[{out_features}, {in_features}]; use --scheme FP8_DYNAMIC, or keep the layer dense "
            "with --ignore",
            param="scheme",
        )


def unpack_layer(
    weight: Tensor, grid: Tensor, scheme: QuantScheme, bias: Tensor | None
) -> QuantizedLinear:
    """The layer of weight [out, in], float8, and its grid of scales, any shape of grid_shape's
    size. FormatError for another dtype, NaN, and scales that give no finite weights.
    """
    expect_dtype("weight", weight, torch.float8_e4m3fn)
    codes = weight.view(torch.uint8)
    if bool(((codes & 0x7F) == 0x7F).any()):
        raise FormatError("weight holds NaN; quantize again or fetch the file again")
    out_features, in_features = weight.shape
    rows, columns = scheme.block(out_features, in_features)
    grid = _float_scales(grid).reshape(grid_shape(scheme, out_features, in_features))
    check_scales(grid, scheme)
    scales = grid.repeat_interleave(rows, dim=0)[:out_features].contiguous()
    return QuantizedLinear(
        codes=codes,
        scales=scales,
        zero_points=torch.zeros(scales.shape, dtype=torch.uint8),
        scheme=scheme,
        g_idx=short_last_group(in_features, columns),
        bias=bias,
    )


def pack_layer(q: QuantizedLinear) -> tuple[Tensor, Tensor]:
    """Weight [out, in], float8, and the grid of scales [⌈out/rows⌉, groups].

    UsageError when the rows of a block don't have the same scales.
    """
    check_scales(q.scales, q.scheme)
    rows, _ = q.scheme.block(*q.shape)
    grid = q.scales[::rows].contiguous()
    if not torch.equal(grid.repeat_interleave(rows, dim=0)[: q.shape[0]], q.scales):
        raise UsageError(f"rows have scales of their own, which {q.scheme.name} can't hold")
    return q.codes.contiguous().view(torch.float8_e4m3fn), grid


def check_scale_shape(name: str, shape: Shape, scheme: QuantScheme, size: tuple[int, int]) -> None:
    """Raise FormatError unless the stored grid is grid_shape's; a single scale has any shape."""
    expected = grid_shape(scheme, *size)
    single = expected == (1, 1) and shape in ((), (1,))
    # One scale a row is also stored as a vector.
    vector = expected[1] == 1 and shape == expected[:1]
    if shape != expected and not single and not vector:
        raise FormatError(
            f"{name} has shape {list(shape)}, expected {list(expected)}; does the quantization "
            "config belong to these weights?"
        )


def _float_scales(grid: Tensor) -> Tensor:
    if grid.dtype not in _EXPONENTS:
        return grid
    return grid.view(torch.float8_e8m0fnu).float()
