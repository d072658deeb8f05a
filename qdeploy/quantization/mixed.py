"""Decoder layers whose linears have different schemes, whatever the method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from qdeploy.quantization.awq import Awq
from qdeploy.quantization.fp8 import Fp8
from qdeploy.quantization.gptq import Gptq
from qdeploy.quantization.method import LayerContext, LayerOutcome, QuantMethod
from qdeploy.quantization.rtn import Rtn
from qdeploy.quantization.scheme import QuantScheme
from qdeploy.quantization.signround import SignRound
from qdeploy.quantization.smoothquant import Smoothed


def quantize_layer(
    method: QuantMethod, context: LayerContext, schemes: Mapping[str, QuantScheme]
) -> LayerOutcome:
    """Every target of the layer in the scheme that `schemes` has for it (local names).

    The method itself does the linears that it is for: with rounded inputs before others, then those
    of the fewest bits, where it matters most. What the others hold then, smoothing folded in, is
    rounded: floats to nearest, integers by GPTQ on the same tokens (it folds nothing), or to
    nearest when the method does that, too. Their reports name that. The next layer is fed what the
    whole quantized layer gives.
    """
    parts: dict[QuantScheme, list[str]] = {}
    for name in context.targets:
        parts.setdefault(schemes[name], []).append(name)
    order = sorted(parts, key=_rank)
    mine = [scheme for scheme in order if _is_for(method, scheme)][:1]
    outcome = LayerOutcome(linears={})
    if mine:
        outcome = method.quantize_layer(_part(context, mine[0], parts[mine[0]]))
    elif isinstance(method, SignRound) and context.reference_forward is not None:
        outcome.references = context.reference_forward()  # before anything changes the layer
    others = [scheme for scheme in order if scheme not in mine]
    for scheme in others:
        _put(context, outcome)
        rounding = _rounding(method, scheme)
        part = replace(_part(context, scheme, parts[scheme]), is_last=True)
        rest = rounding.quantize_layer(part)
        outcome.linears |= rest.linears
        named = None if isinstance(_inner(method), type(rounding)) else _NAMES[type(rounding)]
        outcome.reports += [replace(r, fallback=r.fallback or named) for r in rest.reports]
    if (others or not mine) and method.needs_calibration and not context.is_last:
        assert context.forward is not None
        _put(context, outcome)
        outcome.outputs = context.forward()
    for name in outcome.linears:  # smoothing changed them before they were rounded
        for parameter in ("weight", "bias"):
            outcome.dense.pop(f"{name}.{parameter}", None)
    return outcome


def _put(context: LayerContext, outcome: LayerOutcome) -> None:
    """What is quantized so far, into the layer: what follows sees it."""
    for name, q in outcome.linears.items():
        context.linear(name).weight.data = q.dequantize()


def _rank(scheme: QuantScheme) -> tuple[bool, bool, int]:
    return scheme.number != "int", scheme.activations is None, scheme.bits


def _is_for(method: QuantMethod, scheme: QuantScheme) -> bool:
    """Whether the method rounds to that kind of number."""
    return (scheme.number == "int") != isinstance(method, Fp8)


def _inner(method: QuantMethod) -> QuantMethod:
    return method.method if isinstance(method, Smoothed) else method


def _part(context: LayerContext, scheme: QuantScheme, targets: list[str]) -> LayerContext:
    groups = (tuple(n for n in names if n in targets) for names in context.input_groups)
    kept = tuple(names for names in groups if names)
    return replace(context, scheme=scheme, targets=tuple(targets), input_groups=kept)


def _rounding(method: QuantMethod, scheme: QuantScheme) -> QuantMethod:
    inner = _inner(method)
    if scheme.number != "int":
        return Fp8(needs_calibration=scheme.activations == "static")
    if isinstance(inner, Rtn | Fp8):
        return Rtn()
    sequential = isinstance(inner, Awq | Gptq) and inner.true_sequential
    return Gptq(true_sequential=sequential)


_NAMES: dict[type, str] = {Fp8: "fp8", Gptq: "gptq", Rtn: "rtn"}
