"""One linear layer's learned rounding and ranges: the parameters of SignRound and their steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from qdeploy.quantization.numerics import range_qparams
from qdeploy.quantization.scheme import QuantizedLinear

#: An offset of half a step reaches both neighbouring codes, and no others (SignRound, eq. 3).
MAX_OFFSET = 0.5
#: Range factors stay within these of the start's range.
FACTOR_LIMITS = (0.25, 1.5)
#: A gradient's step is its ratio to the root mean square of about the last ten. The paper's sign is
#: that ratio for the last one alone.
MEMORY = 0.9
LARGEST_STEP = 1 / (1 - MEMORY) ** 0.5
#: Elements worked on at a time: they and their temporaries stay in a core's cache.
CHUNK_ELEMENTS = 1 << 17


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundingState:
    """A copy of what is learned, to go back to: offsets and the two range factors."""

    offsets: Tensor
    low_factor: Tensor
    high_factor: Tensor


class LearnedRounding:
    """W_q = s·(clip(round(W/s + z + V), 0, 2^bits − 1) − z), arXiv 2309.05516, eq. 2–3.

    V in [−½, ½] per weight. s and z come from the start's range of each group, [low, high], times
    two learned factors (β and α of the paper, which has the group's min and max instead). A
    symmetric range has one factor. Scales are rounded to float16 in every step, as on disk.

    Gradients take the rounding for the identity (straight-through). In the range, W_q moves as s·V,
    and as (code − z − W/s)·s; beyond it, W_q is `low` or `high` itself.
    """

    def __init__(self, weight: Tensor, start: QuantizedLinear) -> None:
        """weight: [out, in] float32, not copied; start: a quantization of it, without g_idx."""
        self.scheme = start.scheme
        self._bias = start.bias
        out_features, groups = start.scales.shape
        self._weight = weight.view(out_features, groups, -1)
        scales, zeros = start.scales.float(), start.zero_points.float()
        if self.scheme.symmetric:
            self._high = scales * (self.scheme.max_code / 2)
            self._low = -self._high
        else:
            self._low, self._high = -zeros * scales, (self.scheme.max_code - zeros) * scales
        self._offsets = torch.zeros_like(self._weight)
        self._low_factor, self._high_factor = torch.ones_like(scales), torch.ones_like(scales)
        self._squares = [torch.zeros_like(scales), torch.zeros_like(scales), self._offsets.clone()]
        self._steps = 0

    def qparams(self) -> tuple[Tensor, Tensor]:
        """Scales (float32, exact in float16) and zero points (uint8), [out, groups]."""
        factor = self._high_factor if self.scheme.symmetric else self._low_factor
        return range_qparams(self._low * factor, self._high * self._high_factor, self.scheme)

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """W_q as it is now, [out, in]."""
        scales, zeros = self._columns()
        result = torch.empty(self._weight.shape, dtype=dtype)
        for rows in self._chunks():
            position = self._position(rows, scales, zeros)
            codes = position.round_().clamp_(0, self.scheme.max_code)
            result[rows] = codes.sub_(zeros[rows]).mul_(scales[rows])
        return result.view(result.shape[0], -1)

    def step(self, gradient: Tensor, rate: float) -> None:
        """Move against a gradient of the loss by W_q, [out, in], any float.

        rate: how far, for a gradient as large as its kind has been; in rounding steps.
        """
        self._steps += 1
        gradient = gradient.view(self._weight.shape)
        scales, zeros = self._columns()
        for rows in self._chunks():
            self._step_rows(rows, gradient[rows].float(), scales[rows], zeros[rows], rate)

    def _step_rows(
        self, rows: slice, gradient: Tensor, scales: Tensor, zeros: Tensor, rate: float
    ) -> None:
        position = (self._weight[rows] / scales).add_(zeros)
        ratio = position - zeros
        position.add_(self._offsets[rows])
        rounded = position.round_()
        codes = rounded.clamp(0, self.scheme.max_code)
        # 1 where the range ends, as a float: masks are slow to make and to multiply by.
        outside = (rounded - codes).abs_().clamp_(max=1).mul_(gradient)
        inside = gradient - outside
        by_scale = (inside * (codes - zeros).sub_(ratio)).sum(-1)
        if self.scheme.symmetric:
            by_low, by_high = None, by_scale + (outside * (codes - zeros)).sum(-1)
        else:
            top = self.scheme.max_code
            above = (outside * codes).sum(-1) / top  # codes beyond the range are 0 or the top
            below = outside.sum(-1) - above
            by_low, by_high = by_scale / top - below, by_scale / top + above  # `low` is negative
        learned = (self._low_factor, self._high_factor, self._offsets)
        limits = (FACTOR_LIMITS, FACTOR_LIMITS, (-MAX_OFFSET, MAX_OFFSET))
        gradients = (by_low, by_high, inside)
        for value, squares, slope, limit in zip(
            learned, self._squares, gradients, limits, strict=True
        ):
            if slope is not None:
                self._descend(value[rows], squares[rows], slope, rate)
                value[rows].clamp_(*limit)

    def _descend(self, value: Tensor, squares: Tensor, gradient: Tensor, rate: float) -> None:
        squares.mul_(MEMORY).addcmul_(gradient, gradient, value=1 - MEMORY)
        mean = squares / (1 - MEMORY**self._steps)
        step = gradient.div_(mean.sqrt_().add_(torch.finfo(torch.float32).tiny))
        value.sub_(step.clamp_(-LARGEST_STEP, LARGEST_STEP), alpha=rate)

    def state(self) -> RoundingState:
        """A copy of the parameters."""
        return RoundingState(
            offsets=self._offsets.clone(),
            low_factor=self._low_factor.clone(),
            high_factor=self._high_factor.clone(),
        )

    def restore(self, state: RoundingState) -> None:
        """Go back to a copy, which becomes the parameters."""
        self._offsets = state.offsets
        self._low_factor, self._high_factor = state.low_factor, state.high_factor

    def result(self) -> QuantizedLinear:
        """Codes, scales and zero points as they are now."""
        scales, zeros = self.qparams()
        position = self._position(slice(None), *self._columns())
        codes = position.round_().clamp_(0, self.scheme.max_code)
        return QuantizedLinear(
            codes=codes.view(codes.shape[0], -1).to(torch.uint8),
            scales=scales.to(torch.float16),
            zero_points=zeros,
            scheme=self.scheme,
            bias=self._bias,
        )

    def _columns(self) -> tuple[Tensor, Tensor]:
        scales, zeros = self.qparams()
        return scales.unsqueeze(-1), zeros.float().unsqueeze(-1)

    def _position(self, rows: slice, scales: Tensor, zeros: Tensor) -> Tensor:
        """W/s + z + V, computed the same way everywhere: the codes are what was trained."""
        position = (self._weight[rows] / scales[rows]).add_(zeros[rows])
        return position.add_(self._offsets[rows])

    def _chunks(self) -> Iterator[slice]:
        out_features = self._weight.shape[0]
        step = max(CHUNK_ELEMENTS * out_features // self._weight.numel(), 1)
        for start in range(0, out_features, step):
            yield slice(start, start + step)
