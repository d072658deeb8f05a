"""Linear layers whose rows keep their bits whatever stands beside them (ADR 2)."""

from __future__ import annotations

import torch
from torch import Tensor

#: torch's matmuls choose a kernel, and so an order of summation, by the number of rows; within a
#: tile of fixed height a row has the same bits at every place.
ROW_TILE = 16


def pad_rows(x: Tensor) -> Tensor:
    """Append rows of zeros to x [rows, n] until it consists of whole tiles."""
    rows = -(-x.shape[0] // ROW_TILE) * ROW_TILE
    padded = x.new_zeros(rows, *x.shape[1:])
    padded[: x.shape[0]] = x
    return padded


def tiled_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """X · weightᵀ + bias, float32 [rows, out].

    x: [rows, in], contiguous, rows a multiple of ROW_TILE; weight: [out, in]; bias: [out] or None
    """
    out = x.new_empty(x.shape[0], weight.shape[0])
    transposed = weight.t()
    for start in range(0, x.shape[0], ROW_TILE):
        tile = slice(start, start + ROW_TILE)
        torch.mm(x[tile], transposed, out=out[tile])
    return out if bias is None else out.add_(bias)
