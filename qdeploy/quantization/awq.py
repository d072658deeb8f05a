"""AWQ: scale salient input features up before rounding (Lin et al. 2023, arXiv 2306.00978)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qdeploy.quantization.awq_clip import clip_qparams
from qdeploy.quantization.awq_scales import scale_layer
from qdeploy.quantization.hessian import dampened
from qdeploy.quantization.method import LayerContext, LayerOutcome
from qdeploy.quantization.refine import refit_scales
from qdeploy.quantization.rounding import Rounded, Rounder, round_layer
from qdeploy.quantization.rtn import rtn_quantize
from qdeploy.quantization.scheme import QuantScheme
from qdeploy.quantization.smoothing import smoothing_groups


def round_clipped(weight: Tensor, hessian: Tensor, scheme: QuantScheme) -> Rounded:
    """Nearest codes in ranges shrunk where that lowers the output error; a Rounder.

    AWQ stops there. Here scales are then fitted once more, to these codes and all of H.
    """
    rounded = round_in_clipped_ranges(weight, hessian, scheme)
    codes, zeros = rounded.codes, rounded.zero_points
    rounded.scales = refit_scales(weight, dampened(hessian), codes, rounded.scales, zeros)
    return rounded


def round_in_clipped_ranges(weight: Tensor, hessian: Tensor, scheme: QuantScheme) -> Rounded:
    """AWQ's own rounding, codes being nearest to the weights; a Rounder."""
    h = dampened(hessian)
    size = weight.shape[1] // scheme.groups(weight.shape[1])
    blocks = [h[i : i + size, i : i + size] for i in range(0, weight.shape[1], size)]
    scales, zeros = clip_qparams(weight, scheme, torch.stack(blocks))
    codes = rtn_quantize(weight, scheme, qparams=(scales, zeros)).codes
    return Rounded(codes=codes, scales=scales, zero_points=zeros)


@dataclass(frozen=True)
class Awq:
    """Scales searched for each group of linears and folded away, then `rounder`.

    With GPTQ's rounder the two add up: scales make weights kinder to round, GPTQ makes up for
    what rounding still costs.
    """

    rounder: Rounder = round_clipped
    needs_calibration: bool = True

    def check(self, model_type: str) -> None:
        """Raise UsageError for an architecture without smoothing groups."""
        smoothing_groups(model_type)

    def quantize_layer(self, context: LayerContext) -> LayerOutcome:
        """Scale, fold and round; see scale_layer and round_layer."""
        dense = scale_layer(context)
        outcome = round_layer(context, self.rounder)
        outcome.dense = dense
        return outcome
