"""SmoothQuant (Xiao et al. 2022, arXiv 2211.10438): move outliers of activations into weights.

Where a layer's inputs are rounded to 8 bits per token, one large feature costs all others their
precision. Each feature is divided by s = max|x|^α / max|W|^(1 − α) (equation 4) before the layer,
and the weight's column multiplied by it. The paper smooths the inputs of q, k, v, gate and up,
whose divisor a norm takes up; here o and down as well, whose divisors v and up take up. The paper
has one α; here each group may have its own, or none, by the error of its linears' outputs when
weights and inputs are rounded to 8 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from qdeploy.quantization.folding import fold_groups
from qdeploy.quantization.hessian import AbsoluteMax
from qdeploy.quantization.method import LayerContext, LayerOutcome, QuantMethod
from qdeploy.quantization.numerics import fake_quantize
from qdeploy.quantization.smoothing import SmoothingGroup, expand_heads, smoothing_groups

#: α of all groups, or `auto`: of each group the best of these, or no smoothing.
Alpha = float | Literal["auto"]
ALPHAS = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
#: The smallest maximum that is divided by.
_FLOOR = 1e-5


@torch.no_grad()
def smooth_layer(context: LayerContext, alpha: Alpha) -> dict[str, Tensor]:
    """Smooth every group of the layer, in place; returns dense parameters that changed, as stored.

    Raises CalibrationError if the folded layer no longer computes the same function.
    """
    assert context.forward is not None
    seen = {names[0]: AbsoluteMax() for names in context.input_groups}
    context.forward(seen, stop_after=context.input_groups[-1][0])
    first = {name: names[0] for names in context.input_groups for name in names}
    rows = _search_rows(context, list(seen)) if alpha == "auto" else {}
    scales: dict[SmoothingGroup, Tensor] = {}
    for group in smoothing_groups(context.model_type):
        names = [name for name in group.balance if name in context.targets]
        if names:
            smoothing = _Group(context, group, names, seen[first[names[0]]].max)
            if alpha != "auto":
                scales[group] = smoothing.scales(alpha)
            else:
                scales[group] = smoothing.best(rows[first[names[0]]])
    return fold_groups(context, scales)


def smoothing_scales(x: Tensor, w: Tensor, alpha: float) -> Tensor:
    """Equation 4 for maxima of activations and weights of each feature, [n], float32."""
    scales = x.clamp(min=_FLOOR).pow(alpha) / w.clamp(min=_FLOOR).pow(1 - alpha)
    usable = scales.isfinite() & (scales > 0) & (x > 0)  # a feature never seen stays as it is
    return torch.where(usable, scales, torch.ones_like(scales))


def round_rows(rows: Tensor) -> Tensor:
    """Rows [tokens, n] rounded to 8 bits, one symmetric scale each, as float32."""
    step = rows.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
    return (rows / step).round_().mul_(step)


class _Group:
    """One smoothing group's maxima and linears."""

    def __init__(
        self, context: LayerContext, group: SmoothingGroup, names: Sequence[str], largest: Tensor
    ) -> None:
        self._weights = [context.linear(name).weight.detach() for name in names]
        self._scheme, self._head_dim = context.scheme, context.head_dim
        source = context.layer.get_submodule(group.source).weight
        assert isinstance(source, Tensor)
        x, w = largest, torch.stack([each.abs().amax(0) for each in self._weights]).amax(0)
        count, dim = source.shape[0], context.head_dim
        if group.per_kv_head and x.numel() != count:  # query heads of a KV head share its channels
            x, w = (m.view(count // dim, -1, dim).amax(1).reshape(-1) for m in (x, w))
        self._x, self._w = x, w

    def scales(self, alpha: float) -> Tensor:
        """Scales [source rows]."""
        return smoothing_scales(self._x, self._w, alpha)

    def best(self, rows: Tensor) -> Tensor:
        """The scales of least error on input rows [tokens, in]; ones are among those tried."""
        exact = [rows @ weight.t() for weight in self._weights]
        tried = list(self._candidates())
        errors = torch.tensor([self._error(rows, exact, scales) for scales in tried])
        return tried[int(errors.nan_to_num(torch.inf).argmin())]

    def _candidates(self) -> Iterator[Tensor]:
        yield torch.ones_like(self._x)
        yield from (self.scales(alpha) for alpha in ALPHAS)

    def _error(self, rows: Tensor, exact: Sequence[Tensor], scales: Tensor) -> float:
        """Squared error of each linear's outputs relative to their square, summed."""
        columns = expand_heads(scales, rows.shape[1], self._head_dim)
        rounded = round_rows(rows / columns)
        return sum(
            float(
                (rounded @ fake_quantize(weight * columns, self._scheme).t() - expected)
                .square()
                .sum()
                / expected.square().sum().clamp(min=1e-30)
            )
            for weight, expected in zip(self._weights, exact, strict=True)
        )


def _search_rows(context: LayerContext, names: Sequence[str]) -> dict[str, Tensor]:
    """Input rows [tokens, in] of linears on the search batches."""
    seen: dict[str, list[Tensor]] = {name: [] for name in names}

    def hook(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        return lambda _, inputs: seen[name].append(inputs[0].reshape(-1, inputs[0].shape[-1]))

    with ExitStack() as stack:
        for name in names:
            handle = context.linear(name).register_forward_pre_hook(hook(name))
            stack.callback(handle.remove)
        for batch in context.search_batches:
            context.layer(batch.hidden, **batch.kwargs)
    return {name: torch.cat(rows).float() for name, rows in seen.items()}


@dataclass(frozen=True)
class Smoothed:
    """A method on smoothed layers."""

    method: QuantMethod
    alpha: Alpha
    needs_calibration: bool = True

    def check(self, model_type: str) -> None:
        """Raise UsageError for an architecture without smoothing groups."""
        smoothing_groups(model_type, "use --smoothquant off")
        self.method.check(model_type)

    def quantize_layer(self, context: LayerContext) -> LayerOutcome:
        """Smooth, then quantize."""
        dense = smooth_layer(context, self.alpha)
        outcome = self.method.quantize_layer(context)
        outcome.dense = dense | outcome.dense
        if not outcome.outputs and not context.is_last:
            assert context.forward is not None
            outcome.outputs = context.forward()  # smoothing changes no output
        return outcome
