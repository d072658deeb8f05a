"""Clipping search: shrink each group's range where that lowers the layer's output error."""

from __future__ import annotations

import torch
from torch import Tensor

from qdeploy.quantization.numerics import grouped_range, range_qparams, round_grouped
from qdeploy.quantization.scheme import QuantScheme

#: Least factor of a group's range, and how many steps of it are tried (AWQ: 0.5, 10).
MIN_SHRINK = 0.5
STEPS = 16


def clip_qparams(
    weight: Tensor,
    scheme: QuantScheme,
    moments: Tensor,
    *,
    steps: int = STEPS,
    min_shrink: float = MIN_SHRINK,
) -> tuple[Tensor, Tensor]:
    """Scales (float32, exact in float16) and zero points [out, groups] of least error.

    weight: [out, in] float32; moments: Σ x xᵀ within each group, [groups, g, g] or, for a diagonal
    one, [groups, g]. The error of a row's group is e·M·eᵀ: its share of the output's squared
    error over all calibration tokens, where AWQ takes a sample of tokens.
    """
    low, high = grouped_range(weight, scheme)
    grouped = weight.view(weight.shape[0], low.shape[1], -1)
    scales, zeros = range_qparams(low, high, scheme)
    best = _error(grouped, scales, zeros, scheme, moments)
    for step in range(1, steps + 1):
        shrink = 1 - (1 - min_shrink) * step / steps
        tried_scales, tried_zeros = range_qparams(low * shrink, high * shrink, scheme)
        error = _error(grouped, tried_scales, tried_zeros, scheme, moments)
        better = error < best  # False for NaN: the unclipped range stays
        best = torch.where(better, error, best)
        scales = torch.where(better, tried_scales, scales)
        zeros = torch.where(better, tried_zeros, zeros)
    return scales, zeros


def _error(
    grouped: Tensor, scales: Tensor, zeros: Tensor, scheme: QuantScheme, moments: Tensor
) -> Tensor:
    """Squared output error of each row's group, [out, groups]."""
    error = round_grouped(grouped, scales, zeros, scheme).sub_(grouped)
    if moments.dim() == 2:
        return (error.square_() * moments).sum(-1)
    projected = torch.bmm(error.transpose(0, 1), moments).transpose(0, 1)
    return (projected * error).sum(-1)
