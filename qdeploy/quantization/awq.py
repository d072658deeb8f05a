"""AWQ: scale salient input features up before rounding (Lin et al. 2023, arXiv 2306.00978)."""

from __future__ import annotations

from dataclasses import dataclass, field

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


@dataclass(frozen=True)
class NearestRounder:
    """Nearest codes in ranges shrunk where that lowers the output error (AWQ's clipping).

    AWQ stops there. With `refit` scales are then fitted once more, to these codes and all of H.
    """

    refit: bool = True

    def round(self, weight: Tensor, hessian: Tensor, scheme: QuantScheme) -> Rounded:
        """See Rounder."""
        h = dampened(hessian)
        size = weight.shape[1] // scheme.groups(weight.shape[1])
        blocks = [h[i : i + size, i : i + size] for i in range(0, weight.shape[1], size)]
        scales, zeros = clip_qparams(weight, scheme, torch.stack(blocks))
        codes = rtn_quantize(weight, scheme, qparams=(scales, zeros)).codes
        if self.refit:
            scales = refit_scales(weight, h, codes, scales, zeros)
        return Rounded(codes=codes, scales=scales, zero_points=zeros)

    def importance(self, hessian: Tensor, scheme: QuantScheme) -> Tensor:
        """E[x²] of the feature: errors of different features are taken as independent."""
        return dampened(hessian).diagonal()


@dataclass(frozen=True)
class Awq:
    """Scales searched for each group of linears and folded away, then `rounder`.

    With GPTQ's rounder the two add up: scales make weights kinder to round, GPTQ makes up for
    what rounding still costs.
    """

    rounder: Rounder = field(default_factory=NearestRounder)
    true_sequential: bool = False
    needs_calibration: bool = True

    def check(self, model_type: str) -> None:
        """Raise UsageError for an architecture without smoothing groups."""
        smoothing_groups(model_type)

    def quantize_layer(self, context: LayerContext) -> LayerOutcome:
        """Scale, fold and round; see scale_layer and round_layer."""
        dense = scale_layer(context, self.rounder.importance)
        outcome = round_layer(context, self.rounder, true_sequential=self.true_sequential)
        outcome.dense = dense
        return outcome
