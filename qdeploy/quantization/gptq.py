"""GPTQ: round column by column, push each error onto later columns (arXiv 2210.17323)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from qdeploy.quantization.awq_clip import clip_qparams
from qdeploy.quantization.hessian import DAMPENING, dampened
from qdeploy.quantization.method import LayerContext, LayerOutcome
from qdeploy.quantization.numerics import grouped_range, range_qparams
from qdeploy.quantization.refine import move_codes, refit_scales
from qdeploy.quantization.rounding import Rounded, Rounder, round_layer
from qdeploy.quantization.rtn import rtn_quantize
from qdeploy.quantization.scheme import QuantScheme

#: static: by falling diagonal of H, groups fixed beforehand; group: whole groups by their largest
#: diagonal, sorted inside; none: as stored. On disk, groups are in input order with all of them.
Order = Literal["static", "group", "none"]

#: Dampening is raised in these steps until H can be factorized.
DAMPENING_STEPS = (DAMPENING, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
#: How often scales are refitted, and then codes moved, once all columns are rounded.
ROUNDS = 2
BLOCK_COLUMNS = 128
#: Up to this width the factorization runs in float64.
FLOAT64_FEATURES = 2048


def gptq_quantize(
    weight: Tensor,
    hessian: Tensor,
    scheme: QuantScheme,
    *,
    order: Order = "group",
    search: bool = True,
    rounds: int = ROUNDS,
) -> Rounded:
    """Quantize weight [out, in] float32 with H = E[x xᵀ], [in, in]; neither is modified.

    search: pick each group's range by activation-weighted error instead of min-max. Columns that
    never saw an input (H_ii = 0) neither give nor take errors: they are rounded to nearest, where
    the paper sets them to zero, which deletes weights when calibration was short. rounds: of
    refine.py's two steps at the end, which the paper hasn't.
    """
    factor, permutation, dampening = _factorize(hessian, scheme, order)
    if factor is None or dampening is None:
        scales, zeros = _qparams(weight, hessian.diagonal().clamp(min=0), scheme, search)
        q = rtn_quantize(weight, scheme, qparams=(scales, zeros))
        return Rounded(codes=q.codes, scales=scales, zero_points=zeros, fallback="rtn")
    solver = _Solver(weight, hessian, scheme, factor, permutation, order == "static", search)
    solver.run()
    codes = solver.codes[torch.argsort(permutation)].t().to(torch.uint8).contiguous()
    scales = solver.scales.t().contiguous()
    zeros = solver.zeros.t().to(torch.uint8).contiguous()
    h = dampened(hessian, dampening)
    for _ in range(rounds):
        scales = refit_scales(weight, h, codes, scales, zeros)
        codes = move_codes(weight, h, codes, scales, zeros, scheme)
    return Rounded(codes=codes, scales=scales, zero_points=zeros, dampening=dampening)


class _Solver:
    """State of one run; columns are permuted, groups are numbered as on disk.

    Everything is transposed, [in, out] and [groups, out]: what is worked on at a time, a column
    of the weight, then lies in one piece.
    """

    def __init__(
        self,
        weight: Tensor,
        hessian: Tensor,
        scheme: QuantScheme,
        factor: Tensor,
        permutation: Tensor,
        static: bool,
        search: bool,
    ) -> None:
        self.scheme, self.factor, self.search, self.static = scheme, factor, search, static
        self.weight = weight.float().t()[permutation].contiguous()
        self.diagonal = hessian.diagonal()[permutation].clamp(min=0)
        out_features, in_features = weight.shape
        groups = scheme.groups(in_features)
        self.group_size = in_features // groups
        self.group_of = (permutation // self.group_size).tolist()
        self.codes = torch.zeros(in_features, out_features)
        self.scales = torch.ones(groups, out_features)
        self.zeros = torch.zeros(groups, out_features)
        if static:
            diagonal = hessian.diagonal().clamp(min=0)
            scales, zeros = _qparams(weight.float(), diagonal, scheme, search)
            self.scales, self.zeros = scales.t().contiguous(), zeros.t().float()

    def run(self) -> None:
        """Blocks hold whole groups, so that a group that begins sees all errors so far."""
        size = self.group_size
        block = size * max(BLOCK_COLUMNS // size, 1)
        for start in range(0, len(self.weight), block):
            end = min(start + block, len(self.weight))
            errors = self._block(start, end)
            self.weight[end:].addmm_(self.factor[start:end, end:].t(), errors, alpha=-1)

    def _block(self, start: int, end: int) -> Tensor:
        """Round columns start … end; returns their errors over the factor's diagonal."""
        errors = torch.zeros(end - start, self.weight.shape[1])
        for column in range(start, end):
            if not self.static and column % self.group_size == 0:
                self._begin_group(column)
            group = self.group_of[column]
            scale, zero = self.scales[group], self.zeros[group]
            value, code = self.weight[column], self.codes[column]
            torch.div(value, scale, out=code).add_(zero).round_().clamp_(0, self.scheme.max_code)
            error = errors[column - start]
            torch.sub(value, (code - zero).mul_(scale), out=error)
            error.div_(self.factor[column, column])
            rest = self.weight[column + 1 : end]
            rest.addr_(self.factor[column, column + 1 : end], error, alpha=-1)
        return errors

    def _begin_group(self, column: int) -> None:
        """Scales of a group from its weights as they are now, errors of earlier ones included."""
        columns = slice(column, column + self.group_size)
        scheme = QuantScheme(bits=self.scheme.bits, group_size=-1, symmetric=self.scheme.symmetric)
        group = self.group_of[column]
        scales, zeros = _qparams(
            self.weight[columns].t(), self.diagonal[columns], scheme, self.search
        )
        self.scales[group], self.zeros[group] = scales[:, 0], zeros[:, 0].float()


def _qparams(
    weight: Tensor, diagonal: Tensor, scheme: QuantScheme, search: bool
) -> tuple[Tensor, Tensor]:
    if not search:
        return range_qparams(*grouped_range(weight, scheme), scheme)
    groups = scheme.groups(weight.shape[1])
    # Dampened like H itself: a feature that was hardly seen still has a weight to keep.
    diagonal = diagonal + DAMPENING * diagonal.mean()
    return clip_qparams(weight.contiguous(), scheme, diagonal.reshape(groups, -1))


def _factorize(
    hessian: Tensor, scheme: QuantScheme, order: Order
) -> tuple[Tensor | None, Tensor, float | None]:
    """Upper Cholesky factor of H⁻¹, permuted, with the dampening that it took.

    The factor is None when H can't be factorized at any dampening (NaN, infinity).
    """
    in_features = hessian.shape[0]
    permutation = _permutation(hessian.diagonal(), in_features // scheme.groups(in_features), order)
    dtype = torch.float64 if in_features <= FLOAT64_FEATURES else torch.float32
    matrix = hessian[permutation][:, permutation].to(dtype)
    for share in DAMPENING_STEPS:
        lower, failed = torch.linalg.cholesky_ex(dampened(matrix, share))
        if failed or not bool(lower.isfinite().all()):
            continue
        upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        if not failed and bool(upper.isfinite().all()):
            return upper.float(), permutation, share
    return None, permutation, None


def _permutation(diagonal: Tensor, group_size: int, order: Order) -> Tensor:
    if order == "none":
        return torch.arange(diagonal.numel())
    if order == "static":
        return torch.argsort(diagonal, descending=True, stable=True)
    grouped = diagonal.view(-1, group_size)
    inside = torch.argsort(grouped, dim=1, descending=True, stable=True)
    groups = torch.argsort(grouped.amax(1), descending=True, stable=True)
    starts = torch.arange(grouped.shape[0]).unsqueeze(1) * group_size
    return (inside + starts)[groups].reshape(-1)


@dataclass(frozen=True)
class GptqRounder:
    """gptq_quantize as a Rounder."""

    order: Order = "group"
    search: bool = True
    rounds: int = ROUNDS

    def round(self, weight: Tensor, hessian: Tensor, scheme: QuantScheme) -> Rounded:
        """See gptq_quantize."""
        return gptq_quantize(
            weight, hessian, scheme, order=self.order, search=self.search, rounds=self.rounds
        )

    def importance(self, hessian: Tensor, scheme: QuantScheme) -> Tensor:
        """Variance of a feature that those after it don't explain: later columns can't make up
        for that part of an error (GPTQ's loss is Σ e² / U², U the factor's diagonal).
        """
        factor, permutation, _ = _factorize(hessian, scheme, self.order)
        if factor is None:
            return dampened(hessian).diagonal()
        return factor.diagonal().pow(-2)[torch.argsort(permutation)]


@dataclass(frozen=True)
class Gptq:
    """Linears in order of execution; each sees the inputs that quantized earlier ones give."""

    rounder: Rounder = field(default_factory=GptqRounder)
    true_sequential: bool = False
    needs_calibration: bool = True

    def check(self, model_type: str) -> None:
        """Any architecture."""

    def quantize_layer(self, context: LayerContext) -> LayerOutcome:
        """See round_layer."""
        return round_layer(context, self.rounder, true_sequential=self.true_sequential)
