"""Better scales and codes for a weight that is rounded already, by its whole output error.

The error of a row w is (ŵ − w) H (ŵ − w)ᵀ. With codes fixed it is quadratic in the row's scales,
so their best values are one small linear system a row. With scales fixed, one code after the
other can be moved to its best value (coordinate descent; Behdin et al. 2023, arXiv 2309.01885,
eq. 7). Both lower the error or leave it, so they may be alternated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qdeploy.quantization.numerics import expand_groups, storable_scales
from qdeploy.quantization.scheme import QuantScheme

#: Columns whose codes are moved before the error of the others is brought up to date.
BLOCK_COLUMNS = 128
#: A scale may become so many times smaller or larger; beyond, the row's system was degenerate.
MAX_CHANGE = 2.0
#: Share of the mean diagonal that ties the scales to those before.
TIE = 1e-4


def refit_scales(
    weight: Tensor, hessian: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor
) -> Tensor:
    """Scales [out, groups] of least output error for these codes; float32, exact in float16.

    weight, codes: [out, in]; hessian: [in, in], dampened; scales, zeros: [out, groups]. Each row
    solves A s = b with A = C H Cᵀ and b = C H w, where row g of C holds code − zero of group g and
    0 elsewhere.
    """
    groups = scales.shape[1]
    size = weight.shape[1] // groups
    steps = codes.float() - expand_groups(zeros.float(), weight.shape[1], None)

    def by_group(rows: Tensor) -> Tensor:
        return (rows * steps).view(-1, groups, size).sum(-1)

    right = by_group(weight @ hessian)
    matrix = torch.empty(len(weight), groups, groups)
    for group in range(groups):
        part = slice(group * size, (group + 1) * size)
        matrix[:, group] = by_group(steps[:, part] @ hessian[part])
    diagonal = matrix.diagonal(dim1=1, dim2=2)
    tie = TIE * diagonal.mean(1, keepdim=True) + torch.finfo(torch.float32).tiny
    diagonal.add_(tie)
    system, right = matrix.double(), (right + tie * scales).double()
    solved = torch.linalg.solve_ex(system, right.unsqueeze(-1))[0].squeeze(-1).float()
    usable = (solved > scales / MAX_CHANGE) & (solved < scales * MAX_CHANGE)  # False for NaN
    return storable_scales(torch.where(usable, solved, scales), torch.float16).float()


def move_codes(
    weight: Tensor,
    hessian: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor,
    scheme: QuantScheme,
) -> Tensor:
    """Codes uint8 [out, in] after each was moved once to its best value given all others.

    Columns that matter most move first. Arguments as in refit_scales.
    """
    columns = weight.shape[1]
    order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
    h = hessian[order][:, order]
    step = expand_groups(scales, columns, None)
    offset = expand_groups(zeros.float(), columns, None)
    slope = ((codes.float() - offset) * step - weight) @ hessian  # half the gradient
    # Transposed: a column, which moves at a time, then lies in one piece.
    step, slope, moved = (m.t()[order].contiguous() for m in (step, slope, codes.float()))
    for start in range(0, columns, BLOCK_COLUMNS):
        part = slice(start, start + BLOCK_COLUMNS)
        before = moved[part].clone()
        _move_block(moved[part], slope[part], h[part, part], step[part], scheme.max_code)
        slope.addmm_(h[:, part], (moved[part] - before) * step[part])
    return moved[torch.argsort(order)].t().to(torch.uint8).contiguous()


def _move_block(codes: Tensor, slope: Tensor, h: Tensor, step: Tensor, max_code: int) -> None:
    """Move the codes of a block of columns [block, out], in place; slope is left as it was."""
    slope = slope.clone()
    for column, (code, size) in enumerate(zip(codes, step, strict=True)):
        old = code.clone()
        code.sub_(slope[column] / (size * h[column, column])).round_().clamp_(0, max_code)
        slope.addr_(h[column], (code - old).mul_(size))
