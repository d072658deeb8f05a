"""The methods that `--method` knows; a new one is a line here."""

from __future__ import annotations

from qdeploy.quantization.awq import Awq
from qdeploy.quantization.fp8 import Fp8
from qdeploy.quantization.gptq import Gptq
from qdeploy.quantization.method import QuantMethod
from qdeploy.quantization.rtn import Rtn
from qdeploy.quantization.signround import SignRound
from qdeploy.registry import Registry

METHODS: Registry[QuantMethod] = Registry("method")
METHODS.add("awq", Awq())
METHODS.add("awq+gptq", Awq(rounder=Gptq().round))
METHODS.add("gptq", Gptq())
METHODS.add("signround", SignRound())
METHODS.add("rtn", Rtn())
METHODS.add("fp8", Fp8())
