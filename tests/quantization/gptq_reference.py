"""GPTQ as in the authors' repository (IST-DASLab/gptq, Algorithm 1), without blocks or tricks."""

from __future__ import annotations

import torch
from torch import Tensor


def reference_gptq(
    weight: Tensor, hessian: Tensor, bits: int, group_size: int, dampening: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Dequantized weight, scales and zero points; asymmetric min-max groups, columns in order.

    Each column is rounded, and its error spread over every later column at once.
    """
    weight = weight.double().clone()
    hessian = hessian.double().clone()
    rows, columns = weight.shape
    hessian += torch.eye(columns, dtype=torch.float64) * dampening * hessian.diagonal().mean()
    factor = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)
    result = torch.zeros_like(weight)
    scales = torch.zeros(rows, columns // group_size, dtype=torch.float64)
    zeros = torch.zeros_like(scales)
    top = 2**bits - 1
    for column in range(columns):
        group = column // group_size
        if column % group_size == 0:
            members = weight[:, column : column + group_size]
            low = members.min(1).values.clamp(max=0)
            high = members.max(1).values.clamp(min=0)
            # Stored as float16, like every scale on disk.
            scales[:, group] = ((high - low) / top).half().double()
            zeros[:, group] = (-low / scales[:, group]).round().clamp(0, top)
        scale, zero = scales[:, group], zeros[:, group]
        code = (weight[:, column] / scale + zero).round().clamp(0, top)
        result[:, column] = (code - zero) * scale
        error = (weight[:, column] - result[:, column]) / factor[column, column]
        weight[:, column + 1 :] -= error.unsqueeze(1) * factor[column, column + 1 :].unsqueeze(0)
    return result, scales, zeros
