"""Rounding the linears of a decoder layer in order of execution: what AWQ and GPTQ share."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from qdeploy.quantization.hessian import Hessian
from qdeploy.quantization.method import LayerContext, LayerOutcome, LinearReport
from qdeploy.quantization.rtn import stored_bias
from qdeploy.quantization.scheme import QuantizedLinear, QuantScheme

#: A linear whose error has more than this share of its output's power is named in a warning.
LOUD_ERROR = 0.5


@dataclass(slots=True, kw_only=True)
class Rounded:
    """Codes uint8 [out, in]; scales (float32, exact in float16) and zero points [out, groups].

    dampening: share of the mean diagonal that H took; fallback: the method that was used instead
    """

    codes: Tensor
    scales: Tensor
    zero_points: Tensor
    dampening: float | None = None
    fallback: str | None = None

    def split(self, sizes: Sequence[int]) -> list[Rounded]:
        """Take apart linears that were rounded as one tall matrix of so many rows each."""
        parts = zip(
            self.codes.split(sizes),
            self.scales.split(sizes),
            self.zero_points.split(sizes),
            strict=True,
        )
        return [
            replace(self, codes=codes, scales=scales, zero_points=zeros)
            for codes, scales, zeros in parts
        ]


class Rounder(Protocol):
    """Rounds one weight by H = E[x xᵀ], [in, in]; modifies neither."""

    def round(self, weight: Tensor, hessian: Tensor, scheme: QuantScheme) -> Rounded:
        """Codes of weight [out, in], float32."""

    def importance(self, hessian: Tensor, scheme: QuantScheme) -> Tensor:
        """What a squared rounding error of each input feature costs in the output, [in]."""


@torch.no_grad()
def round_layer(
    context: LayerContext, rounder: Rounder, *, true_sequential: bool = False
) -> LayerOutcome:
    """Round every target and propagate: the outcome's outputs are the quantized layer's.

    What is first in the layer (q, k and v) sees its inputs as they are; the other Hessians come
    from one pass over the layer with those already rounded. true_sequential: a pass for each, so
    that every linear sees what all quantized ones before it give: about as good on SmolLM2, at
    twice the forward passes. `loss` is the mean squared error of a linear's outputs.
    """
    assert context.forward is not None
    outcome = LayerOutcome(linears={})
    groups = context.input_groups
    stages = [(names,) for names in groups] if true_sequential else [groups[:1], groups[1:]]
    for stage in filter(None, stages):
        start = time.monotonic()
        hessians = {names[0]: Hessian() for names in stage}
        context.forward(hessians, stop_after=stage[-1][0])
        for names in stage:
            matrix = hessians.pop(names[0]).matrix
            _round_shared(context, names, matrix, rounder, outcome, start)
            start = time.monotonic()
    if not context.is_last:
        outcome.outputs = context.forward()
    return outcome


def _round_shared(
    context: LayerContext,
    names: tuple[str, ...],
    hessian: Tensor,
    rounder: Rounder,
    outcome: LayerOutcome,
    start: float,
) -> None:
    """Linears that share an input are one tall matrix: rows don't interact."""
    linears = [context.linear(name) for name in names]
    weight = torch.cat([linear.weight.detach() for linear in linears])
    result = rounder.round(weight, hessian, context.scheme)
    if result.fallback is not None:
        context.warn(f"{context.name}: H of {', '.join(names)} has no factor; rounded to nearest")
    parts = result.split([linear.out_features for linear in linears])
    seconds = (time.monotonic() - start) / len(names)
    for name, linear, part in zip(names, linears, parts, strict=True):
        q = QuantizedLinear(
            codes=part.codes.contiguous(),
            scales=part.scales.to(torch.float16),
            zero_points=part.zero_points.contiguous(),
            scheme=context.scheme,
            bias=stored_bias(context, name),
        )
        outcome.linears[name] = q
        dequantized = q.dequantize()
        loss = _power(dequantized - linear.weight, hessian)
        _warn_if_loud(context, name, loss, _power(linear.weight, hessian))
        linear.weight.data = dequantized
        report = LinearReport(
            name=name, loss=loss, dampening=part.dampening, fallback=part.fallback, seconds=seconds
        )
        outcome.reports.append(report)


def _power(weight: Tensor, hessian: Tensor) -> float:
    """Mean square of the outputs that a weight [out, in] gives."""
    return ((weight @ hessian) * weight).sum().item() / len(weight)


def _warn_if_loud(context: LayerContext, name: str, loss: float, power: float) -> None:
    if loss > LOUD_ERROR * power:
        context.warn(
            f"{context.name}.{name}: rounding errors are {loss / power:.0%} of its output's power; "
            "keep it dense with --ignore, or give it more bits"
        )
