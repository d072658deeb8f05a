"""Decides how a matrix, or several that share an input, is packed. No choice changes a weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from qdeploy_kernels.cpu.abi import Kind
from qdeploy_kernels.cpu.tiles import (
    Codes,
    TileMatrix,
    interleave_rows,
    pack_codes,
    pack_dense,
    pack_fp8,
    stack_rows,
)

#: int32 products of a group must not overflow, and int8 activations share a scale over one.
MAX_GROUP = 128


class _Scheme(Protocol):
    @property
    def bits(self) -> int: ...

    @property
    def number(self) -> str: ...

    @property
    def group_size(self) -> int: ...


class QuantizedWeight(Protocol):
    """W = (codes − zero_points[:, g_idx]) · scales[:, g_idx], as qdeploy's QuantizedLinear; with
    scheme.number `e4m3` the codes are bits of float8 values, in runs of scheme.group_size columns.
    """

    @property
    def codes(self) -> Tensor: ...

    @property
    def scales(self) -> Tensor: ...

    @property
    def zero_points(self) -> Tensor: ...

    @property
    def g_idx(self) -> Tensor | None: ...

    @property
    def scheme(self) -> _Scheme: ...


#: A dense tensor [rows, cols] of any float dtype, or codes.
Weight: TypeAlias = Tensor | QuantizedWeight
_Arrange = Callable[[Sequence[Tensor]], Tensor]


def pack_matrix(
    parts: Sequence[Weight],
    biases: Sequence[Tensor | None],
    *,
    interleave: bool = False,
    permutable: bool = True,
) -> TileMatrix:
    """Pack parts [rows, cols] that multiply the same input as one matrix.

    biases: float32 [rows] or None, one a part. interleave: gate and up, else rows are joined.
    permutable: whether columns may be reordered (a table that rows are looked up in can't).
    """
    arrange = interleave_rows if interleave else stack_rows
    rows = sum(_shape(part)[0] for part in parts)
    packed = _pack_fp8(parts, rows, arrange)
    if packed is None:
        packed = _pack_quantized(parts, rows, arrange, permutable)
    if packed is None:
        packed = pack_dense(arrange([_dense(part) for part in parts]), rows)
    if all(bias is None for bias in biases):
        return packed
    vectors = [
        torch.zeros(_shape(part)[0]) if bias is None else bias.float()
        for part, bias in zip(parts, biases, strict=True)
    ]
    return replace(packed, bias=arrange(vectors).numpy())


def _pack_quantized(
    parts: Sequence[Weight], rows: int, arrange: _Arrange, permutable: bool
) -> TileMatrix | None:
    """The parts under one scheme that holds them all exactly; None where there is none."""
    quantized = [part for part in parts if not isinstance(part, Tensor)]
    integers = all(part.scheme.number == "int" for part in quantized)
    if len(quantized) < len(parts) or not integers or not all(map(_exact_scales, quantized)):
        return None
    group = tile_group(math.gcd(*(_group(part) for part in quantized)))
    orders = [_column_order(part) for part in quantized]
    order = orders[0]
    same = _all_equal(orders) and all(_is_regular(part) for part in quantized)
    if group is None or not same or not (permutable or order is None):
        return None
    codes = [part.codes if order is None else part.codes[:, order] for part in quantized]
    matrix = Codes(
        kind=Kind.W8 if any(part.scheme.bits > 4 for part in quantized) else Kind.W4,
        group=group,
        codes=arrange(codes),
        scales=arrange([_regroup(part.scales, _group(part), group) for part in quantized]),
        zeros=arrange([_regroup(part.zero_points, _group(part), group) for part in quantized]),
    )
    packed = pack_codes(matrix, rows)
    return packed if order is None else replace(packed, permutation=order.int().numpy())


def _pack_fp8(parts: Sequence[Weight], rows: int, arrange: _Arrange) -> TileMatrix | None:
    """Float8 parts, in the smallest of their groups; None if any isn't, or groups don't fit."""
    floats = [part for part in parts if not isinstance(part, Tensor)]
    if len(floats) < len(parts) or any(part.scheme.number != "e4m3" for part in floats):
        return None
    columns = floats[0].codes.shape[1]
    sizes = [_run(part) for part in floats]
    group = min(sizes)
    if any(size % group for size in sizes if size < columns) or (group % 4 and group < columns):
        return None
    starts = range(0, columns, group)
    scales = [
        part.scales[:, [start // size for start in starts]]
        for part, size in zip(floats, sizes, strict=True)
    ]
    codes = arrange([part.codes for part in floats])
    return pack_fp8(codes, arrange([each.float() for each in scales]), group, rows)


def tile_group(group: int) -> int | None:
    """The largest group that divides `group` and tiles can have; a multiple of 16 if possible."""
    for multiple in (16, 8):
        fits = [g for g in range(multiple, MAX_GROUP + 1, multiple) if group % g == 0]
        if fits:
            return fits[-1]
    return None


def _regroup(per_group: Tensor, old: int, new: int) -> Tensor:
    """Repeat what belongs to a group for the smaller groups that it is cut into."""
    return per_group.repeat_interleave(old // new, dim=1)


def _column_order(part: QuantizedWeight) -> Tensor | None:
    """The columns group by group; None when they stand so already."""
    if part.g_idx is None:
        return None
    order = torch.argsort(part.g_idx, stable=True)
    return None if torch.equal(order, torch.arange(len(order))) else order


def _is_regular(part: QuantizedWeight) -> bool:
    """Whether each group has as many columns as the others."""
    if part.g_idx is None:
        return True
    counts = torch.bincount(part.g_idx, minlength=part.scales.shape[1])
    return bool((counts == _group(part)).all())


def _all_equal(orders: Sequence[Tensor | None]) -> bool:
    first = orders[0]
    if first is None:
        return all(order is None for order in orders)
    return all(order is not None and torch.equal(order, first) for order in orders)


def _exact_scales(part: QuantizedWeight) -> bool:
    """Whether float16 holds the scales, and whether groups divide the columns."""
    whole = part.codes.shape[1] % part.scales.shape[1] == 0
    return whole and torch.equal(part.scales.half().float(), part.scales.float())


def _group(part: QuantizedWeight) -> int:
    return part.codes.shape[1] // part.scales.shape[1]


def _run(part: QuantizedWeight) -> int:
    """Columns of a float8 group; the last one may have fewer."""
    columns, size = part.codes.shape[1], part.scheme.group_size
    return columns if size == -1 else min(size, columns)


def _shape(part: Weight) -> tuple[int, int]:
    tensor = part if isinstance(part, Tensor) else part.codes
    return (tensor.shape[0], tensor.shape[1])


def _dense(part: Weight) -> Tensor:
    if isinstance(part, Tensor):
        return part
    group = part.g_idx
    floats = part.scheme.number == "e4m3"
    if group is None or floats:
        group = torch.arange(part.codes.shape[1]) // (_run(part) if floats else _group(part))
    index = group.long()
    if floats:
        return part.codes.view(torch.float8_e4m3fn).float() * part.scales.float()[:, index]
    return (part.codes.float() - part.zero_points.float()[:, index]) * part.scales.float()[:, index]
