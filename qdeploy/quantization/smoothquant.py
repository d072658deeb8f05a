"""SmoothQuant (Xiao et al. 2022, arXiv 2211.10438): move outliers of activations into weights.

Where a layer's inputs are rounded to 8 bits per token, one large feature costs all others their
precision. Each feature is divided by s = max|x|^α / max|W|^(1 − α) (equation 4) before the layer,
and the weight's column multiplied by it. The paper smooths the inputs of q, k, v, gate and up,
whose divisor a norm takes up; here o and down as well, whose divisors v and up take up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from qdeploy.quantization.folding import fold_groups
from qdeploy.quantization.hessian import AbsoluteMax
from qdeploy.quantization.method import LayerContext, LayerOutcome, QuantMethod
from qdeploy.quantization.smoothing import SmoothingGroup, smoothing_groups

#: The smallest maximum that is divided by.
_FLOOR = 1e-5


@torch.no_grad()
def smooth_layer(context: LayerContext, alpha: float) -> dict[str, Tensor]:
    """Smooth every group of the layer, in place; returns dense parameters that changed, as stored.

    Raises CalibrationError if the folded layer no longer computes the same function.
    """
    assert context.forward is not None
    seen = {names[0]: AbsoluteMax() for names in context.input_groups}
    context.forward(seen)
    largest = {name: seen[names[0]].max for names in context.input_groups for name in names}
    return fold_groups(
        context,
        {
            group: _scales(context, group, largest, alpha)
            for group in smoothing_groups(context.model_type)
            if any(name in context.targets for name in group.balance)
        },
    )


def smoothing_scales(x: Tensor, w: Tensor, alpha: float) -> Tensor:
    """Equation 4 for maxima of activations and weights of each feature, [n], float32."""
    scales = x.clamp(min=_FLOOR).pow(alpha) / w.clamp(min=_FLOOR).pow(1 - alpha)
    usable = scales.isfinite() & (scales > 0) & (x > 0)  # a feature never seen stays as it is
    return torch.where(usable, scales, torch.ones_like(scales))


def _scales(
    context: LayerContext, group: SmoothingGroup, largest: Mapping[str, Tensor], alpha: float
) -> Tensor:
    """Scales [source rows] of a group."""
    x = next(largest[name] for name in group.balance if name in largest)
    linears = [context.linear(name) for name in group.balance if name in context.targets]
    w = torch.stack([linear.weight.detach().abs().amax(0) for linear in linears]).amax(0)
    source = context.layer.get_submodule(group.source).weight
    assert isinstance(source, Tensor)
    rows, dim = source.shape[0], context.head_dim
    if group.per_kv_head and x.numel() != rows:  # query heads of a KV head share its channels
        x, w = (m.view(rows // dim, -1, dim).amax(1).reshape(-1) for m in (x, w))
    return smoothing_scales(x, w, alpha)


@dataclass(frozen=True)
class Smoothed:
    """A method on smoothed layers."""

    method: QuantMethod
    alpha: float
    needs_calibration: bool = True

    def check(self, model_type: str) -> None:
        """Raise UsageError for an architecture without smoothing groups."""
        smoothing_groups(model_type)
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
