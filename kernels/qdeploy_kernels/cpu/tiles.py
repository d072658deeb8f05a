"""Packs matrices into the tiles that kernels/cpp/qdeploy_cpu.h describes, and unpacks them.

Rows stand in tile order here: padded to whole tiles of 32 rows (`stack_rows`), or gate and up
interleaved by 16 (`interleave_rows`). Columns of a quantized matrix stand group by group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qdeploy_kernels.cpu import abi
from qdeploy_kernels.cpu.abi import Kind

TILE_ROWS = 32
ALIGNMENT = 64
#: The zero point of a symmetric matrix.
MIDDLE = {Kind.W4: 8, Kind.W8: 128}


@dataclass(frozen=True, slots=True, kw_only=True)
class TileMatrix:
    """A packed matrix [rows, cols]; the fields are those of qd_matrix.

    tiles: uint8 [num_tiles, tile_bytes]; bias: float32 [num_tiles · 32] in tile order, or None
    permutation: int32 [cols], the input feature of each column, or None
    """

    kind: Kind
    rows: int
    cols: int
    group: int
    symmetric: bool
    tiles: NDArray[np.uint8]
    bias: NDArray[np.float32] | None = None
    permutation: NDArray[np.int32] | None = None

    def struct(self) -> abi.Matrix:
        """qd_matrix over these arrays, which the caller must keep alive."""
        return abi.Matrix(
            rows=self.rows,
            cols=self.cols,
            kind=self.kind,
            group=self.group,
            symmetric=self.symmetric,
            tile_bytes=self.tiles.shape[1],
            tiles=self.tiles.ctypes.data,
            bias=None if self.bias is None else self.bias.ctypes.data,
            permutation=None if self.permutation is None else self.permutation.ctypes.data,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Codes:
    """A quantized matrix before packing: weight = (codes − zeros) · scales.

    codes: uint8 [rows, cols]; scales: float16 and zeros: uint8, both [rows, cols / group]
    """

    kind: Kind
    group: int
    codes: Tensor
    scales: Tensor
    zeros: Tensor


def stack_rows(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate parts [rows, …] and pad with zero rows to whole tiles."""
    joined = torch.cat(list(parts))
    return _pad(joined, TILE_ROWS)


def interleave_rows(parts: Sequence[Tensor]) -> Tensor:
    """Gate and up [n, …]: row r of gate in half 0, row r of up in half 1 of tile r / 16."""
    half = TILE_ROWS // 2
    halves = [_pad(part, half).unflatten(0, (-1, half)) for part in parts]
    return torch.stack(halves, dim=1).flatten(0, 2)


def _pad(x: Tensor, multiple: int) -> Tensor:
    missing = -x.shape[0] % multiple
    return torch.cat((x, x.new_zeros(missing, *x.shape[1:]))) if missing else x


def pack_codes(matrix: Codes, rows: int) -> TileMatrix:
    """Pack W4 or W8. Rows of `matrix` are in tile order; `rows` counts those that aren't padding.

    Zero points aren't stored where every one is, or can be made, the middle code: codes and zero
    points of a group may move together without changing a weight.
    """
    centred = _centred(matrix)
    codes = matrix.codes if centred is None else centred
    groups = codes.shape[1] // matrix.group
    blocks = _code_bytes(codes, matrix.kind).flatten(1).unflatten(1, (groups, -1))
    parts = [blocks, _lanes(matrix.scales.half()).view(torch.uint8)]
    if centred is None:
        parts.append(_lanes(matrix.zeros))
    tiles = torch.cat(parts, dim=2).flatten(1)
    padded = tile_bytes(matrix.kind, codes.shape[1], matrix.group, centred is not None)
    return TileMatrix(
        kind=matrix.kind,
        rows=rows,
        cols=codes.shape[1],
        group=matrix.group,
        symmetric=centred is not None,
        tiles=torch.nn.functional.pad(tiles, (0, padded - tiles.shape[1])).numpy(),
    )


def pack_fp8(codes: Tensor, scales: Tensor, group: int, rows: int) -> TileMatrix:
    """Pack FP8. Rows are in tile order; `rows` counts those that aren't padding.

    codes: the bits of float8 values, uint8 [padded rows, cols]; scales: [padded rows, groups], any
    float dtype. Each group has `group` columns, the last one perhaps fewer.
    """
    columns = codes.shape[1]
    parts = []
    for index, start in enumerate(range(0, columns, group)):
        piece = codes[:, start : start + group]
        fours = torch.nn.functional.pad(piece, (0, -piece.shape[1] % 4))
        lanes = fours.view(-1, TILE_ROWS, fours.shape[1] // 4, 4)[..., [0, 2, 1, 3]]
        parts.append(lanes.transpose(1, 2).flatten(1))
        per_row = scales[:, index].float().contiguous().view(torch.uint8)
        parts.append(per_row.view(len(lanes), -1))
    return TileMatrix(
        kind=Kind.FP8,
        rows=rows,
        cols=columns,
        group=group,
        symmetric=True,
        tiles=torch.cat(parts, dim=1).numpy(),
    )


def pack_dense(weight: Tensor, rows: int) -> TileMatrix:
    """Pack [padded rows, cols] in tile order as BF16 where that loses nothing, else as F32."""
    short = _as_bfloat16(weight)
    lanes = weight.float() if short is None else short
    per_column = 1 if short is None else 2
    lanes = torch.nn.functional.pad(lanes, (0, -weight.shape[1] % per_column))
    grouped = lanes.view(-1, TILE_ROWS, lanes.shape[1] // per_column, per_column)
    tiles = grouped.transpose(1, 2).contiguous().flatten(1).view(torch.uint8)
    return TileMatrix(
        kind=Kind.F32 if short is None else Kind.BF16,
        rows=rows,
        cols=weight.shape[1],
        group=0,
        symmetric=False,
        tiles=tiles.numpy(),
    )


def tile_bytes(kind: Kind, cols: int, group: int, symmetric: bool) -> int:
    """Bytes of one tile; `group` matters for W4, W8 and FP8, `symmetric` for the first two."""
    if kind is Kind.F32:
        return TILE_ROWS * cols * 4
    if kind is Kind.BF16:
        return TILE_ROWS * (cols + cols % 2) * 2
    if kind is Kind.FP8:
        return TILE_ROWS * (cols + -cols % 4 + 4 * -(-cols // group))
    codes = TILE_ROWS * cols // (2 if kind is Kind.W4 else 1)
    size = codes + TILE_ROWS * (cols // group) * (2 if symmetric else 3)
    return size + -size % ALIGNMENT


def _as_bfloat16(weight: Tensor) -> Tensor | None:
    """The weight in bfloat16; None if that would round. In pieces: a token table is large."""
    if weight.dtype == torch.bfloat16:
        return weight
    short = weight.to(torch.bfloat16)
    pieces = zip(short.split(4096), weight.split(4096), strict=True)
    return short if all(torch.equal(s.float(), w.float()) for s, w in pieces) else None


def _centred(matrix: Codes) -> Tensor | None:
    """Codes with the middle as zero point in every group that has weights; None if they can't."""
    middle = MIDDLE[matrix.kind]
    if bool(((matrix.zeros == middle) | (matrix.scales == 0)).all()):
        return matrix.codes
    grouped = matrix.codes.unflatten(1, (-1, matrix.group))
    moved = grouped.short() + (middle - matrix.zeros.short()).unsqueeze(-1)
    moved = torch.where((matrix.scales == 0).unsqueeze(-1), middle, moved)
    if int(moved.min()) < 0 or int(moved.max()) >= 2 * middle:
        return None
    return moved.to(torch.uint8).flatten(1)


def _code_bytes(codes: Tensor, kind: Kind) -> Tensor:
    """uint8 [tiles, column blocks, 32 lanes, 4 bytes]."""
    lanes = codes.view(-1, TILE_ROWS, codes.shape[1])
    if kind is Kind.W8:
        return lanes.view(*lanes.shape[:2], -1, 4).transpose(1, 2)
    eights = lanes.view(*lanes.shape[:2], -1, 2, 4)
    return (eights[..., 0, :] | eights[..., 1, :] << 4).transpose(1, 2)


def _lanes(per_group: Tensor) -> Tensor:
    """[padded rows, groups] → [tiles, groups, 32]."""
    return per_group.view(-1, TILE_ROWS, per_group.shape[1]).transpose(1, 2).contiguous()
