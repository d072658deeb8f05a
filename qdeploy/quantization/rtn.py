"""Round to nearest: no calibration, the baseline."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from qdeploy.quantization.method import LayerContext, LayerOutcome, LinearReport
from qdeploy.quantization.numerics import grouped_range, quantize, range_qparams
from qdeploy.quantization.scheme import QuantizedLinear, QuantScheme


def rtn_quantize(
    weight: Tensor,
    scheme: QuantScheme,
    *,
    bias: Tensor | None = None,
    qparams: tuple[Tensor, Tensor] | None = None,
) -> QuantizedLinear:
    """Nearest codes of weight [out, in], with min-max scales unless `qparams` gives others.

    qparams: scales (float32, exact in float16) and zero points, both [out, groups].
    """
    scales, zeros = qparams or range_qparams(*grouped_range(weight, scheme), scheme)
    return QuantizedLinear(
        codes=quantize(weight, scales, zeros, scheme),
        scales=scales.to(torch.float16),
        zero_points=zeros,
        scheme=scheme,
        bias=bias,
    )


def stored_bias(context: LayerContext, name: str) -> Tensor | None:
    """The linear's bias in its dtype on disk, None when it has none."""
    bias = context.linear(name).bias
    if bias is None:
        return None
    return bias.detach().to(context.store_dtypes[f"{name}.bias"])


def each_on_its_own(
    context: LayerContext, rounded: Callable[[str, Tensor], QuantizedLinear]
) -> LayerOutcome:
    """Every target by `rounded(name, weight [out, in])`, whatever the others are.

    `loss` is the mean squared error of the weight.
    """
    outcome = LayerOutcome(linears={})
    for name in context.targets:
        start = time.monotonic()
        weight = context.linear(name).weight.detach()
        q = outcome.linears[name] = rounded(name, weight)
        loss = (q.dequantize() - weight).square().mean().item()
        seconds = time.monotonic() - start
        outcome.reports.append(LinearReport(name=name, loss=loss, seconds=seconds))
    return outcome


@dataclass(frozen=True)
class Rtn:
    """Every target rounded on its own."""

    needs_calibration: bool = False

    def check(self, model_type: str) -> None:
        """Any architecture."""

    def quantize_layer(self, context: LayerContext) -> LayerOutcome:
        """See each_on_its_own."""

        def rounded(name: str, weight: Tensor) -> QuantizedLinear:
            return rtn_quantize(weight, context.scheme, bias=stored_bias(context, name))

        return each_on_its_own(context, rounded)
