"""The methods that `--method` knows; a new one is a line here."""

from __future__ import annotations

from dataclasses import replace

from qdeploy.quantization.awq import Awq
from qdeploy.quantization.fp8 import Fp8
from qdeploy.quantization.gptq import Gptq, GptqRounder
from qdeploy.quantization.method import QuantMethod
from qdeploy.quantization.rtn import Rtn
from qdeploy.quantization.scheme import QuantScheme
from qdeploy.quantization.signround import SignRound
from qdeploy.quantization.smoothquant import Alpha, Smoothed
from qdeploy.registry import Registry

METHODS: Registry[QuantMethod] = Registry("method")
METHODS.add("awq", Awq())
METHODS.add("awq+gptq", Awq(rounder=GptqRounder()))
METHODS.add("gptq", Gptq())
METHODS.add("signround", SignRound())
METHODS.add("rtn", Rtn())
METHODS.add("fp8", Fp8())


def method_for(
    name: str, scheme: QuantScheme, alpha: Alpha | None, true_sequential: bool = False
) -> QuantMethod:
    """The method `name` for a scheme: static activations are calibrated; with `alpha`, layers are
    smoothed first (SmoothQuant); true_sequential: see round_layer.
    """
    method = METHODS.get(name)
    if isinstance(method, Awq | Gptq):
        method = replace(method, true_sequential=true_sequential)
    if scheme.number == "e4m3" and scheme.activations == "static":
        method = Fp8(needs_calibration=True)
    return method if alpha is None else Smoothed(method, alpha)
