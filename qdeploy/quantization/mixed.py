"""Decoder layers whose linears have different schemes, whatever the method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from qdeploy.quantization.fp8 import Fp8
from qdeploy.quantization.gptq import Gptq
from qdeploy.quantization.method import LayerContext, LayerOutcome, QuantMethod
from qdeploy.quantization.rtn import Rtn
from qdeploy.quantization.scheme import QuantScheme
from qdeploy.quantization.signround import SignRound


def quantize_layer(
    method: QuantMethod, context: LayerContext, schemes: Mapping[str, QuantScheme]
) -> LayerOutcome:
    """Every target of the layer in the scheme that `schemes` has for it (local names).

    The method itself does the linears of the fewest bits, where it matters most: its search, its
    smoothing and what its outputs mean stay as they are. What the others hold then, smoothing
    folded in, is rounded: floats to nearest, integers by GPTQ on the same tokens (it folds
    nothing), or to nearest when the method needs no calibration. Their reports name that.
    """
    parts: dict[QuantScheme, list[str]] = {}
    for name in context.targets:
        parts.setdefault(schemes[name], []).append(name)
    if not parts:
        return method.quantize_layer(context)
    first, *others = sorted(parts, key=lambda scheme: (scheme.number != "int", scheme.bits))
    outcome = _first(method, _part(context, first, parts[first]))
    for scheme in others:
        rounding = _rounding(method, scheme)
        rest = rounding.quantize_layer(_part(context, scheme, parts[scheme]))
        outcome.linears |= rest.linears
        own = isinstance(method, type(rounding))
        named = None if own else _NAMES[type(rounding)]
        outcome.reports += [replace(r, fallback=r.fallback or named) for r in rest.reports]
        if own:
            outcome.outputs = rest.outputs
    for name in outcome.linears:  # smoothing changed them before they were rounded
        for parameter in ("weight", "bias"):
            outcome.dense.pop(f"{name}.{parameter}", None)
    return outcome


def _first(method: QuantMethod, context: LayerContext) -> LayerOutcome:
    """By the method, unless it rounds to the other kind of number."""
    if (context.scheme.number == "int") != isinstance(method, Fp8):
        return method.quantize_layer(context)
    outcome = _rounding(method, context.scheme).quantize_layer(context)
    last = context.is_last or len(outcome.outputs) > 0
    if method.needs_calibration and not last and context.forward is not None:
        outcome.outputs = context.forward()
        if isinstance(method, SignRound) and context.reference_forward is not None:
            outcome.references = context.reference_forward()
    return outcome


def _part(context: LayerContext, scheme: QuantScheme, targets: list[str]) -> LayerContext:
    groups = (tuple(n for n in names if n in targets) for names in context.input_groups)
    kept = tuple(names for names in groups if names)
    return replace(context, scheme=scheme, targets=tuple(targets), input_groups=kept)


def _rounding(method: QuantMethod, scheme: QuantScheme) -> QuantMethod:
    if scheme.number != "int":
        return Fp8(needs_calibration=scheme.activations == "static")
    return Gptq() if method.needs_calibration else Rtn()


_NAMES: dict[type, str] = {Fp8: "fp8", Gptq: "gptq", Rtn: "rtn"}
