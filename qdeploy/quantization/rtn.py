"""Round to nearest: no calibration, the baseline."""

from __future__ import annotations

import time
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


@dataclass(frozen=True)
class Rtn:
    """Every target rounded on its own."""

    needs_calibration: bool = False

    def check(self, model_type: str) -> None:
        """Any architecture."""

    def quantize_layer(self, context: LayerContext) -> LayerOutcome:
        """`loss` is the mean squared error of the weight."""
        outcome = LayerOutcome(linears={})
        for name in context.targets:
            start = time.monotonic()
            weight = context.linear(name).weight.detach()
            q = rtn_quantize(weight, context.scheme, bias=stored_bias(context, name))
            outcome.linears[name] = q
            loss = (q.dequantize() - weight).square().mean().item()
            report = LinearReport(name=name, loss=loss, seconds=time.monotonic() - start)
            outcome.reports.append(report)
        return outcome
