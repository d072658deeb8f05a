"""One layer's linears in several schemes: who rounds what, and what the next layer is fed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from qdeploy.quantization import gptq
from qdeploy.quantization.awq import Awq
from qdeploy.quantization.gptq import Gptq
from qdeploy.quantization.method import QuantMethod
from qdeploy.quantization.mixed import quantize_layer
from qdeploy.quantization.rtn import Rtn
from qdeploy.quantization.scheme import QuantScheme, fp8_scheme, w8a8_scheme
from qdeploy.quantization.signround import SignRound
from qdeploy.quantization.smoothquant import Smoothed
from quantization.layer_contexts import layer_context, tiny

DOWN = "mlp.down_proj"
CALIBRATED = [Awq(), Gptq(), SignRound(iters=3), Smoothed(Rtn(), 0.8)]


@pytest.mark.parametrize("method", CALIBRATED, ids=lambda method: type(method).__name__)
@pytest.mark.parametrize("other", [QuantScheme(bits=8, group_size=32), fp8_scheme("FP8_DYNAMIC")])
def test_the_next_layer_is_fed_by_the_whole_quantized_layer(
    method: QuantMethod, other: QuantScheme
) -> None:
    context = layer_context(tiny("llama"))
    schemes = dict.fromkeys(context.targets, context.scheme) | {DOWN: other}
    outcome = quantize_layer(method, context, schemes)
    assert context.forward is not None
    for name, q in outcome.linears.items():
        assert torch.equal(context.linear(name).weight, q.dequantize())
    for mine, theirs in zip(outcome.outputs, context.forward(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("method", CALIBRATED, ids=lambda method: type(method).__name__)
def test_a_layer_without_targets_passes_its_inputs_on(method: QuantMethod) -> None:
    context = replace(layer_context(tiny("llama")), targets=(), input_groups=())
    outcome = quantize_layer(method, context, {})
    assert context.forward is not None
    assert outcome.linears == {}
    assert len(outcome.outputs) == len(context.forward())
    assert bool(outcome.references) == isinstance(method, SignRound)


def test_smoothing_is_for_the_linears_whose_inputs_are_rounded() -> None:
    context = layer_context(tiny("llama"))
    before = context.layer.input_layernorm.weight.clone()  # type: ignore[union-attr, operator]
    schemes = dict.fromkeys(context.targets, w8a8_scheme())
    schemes[DOWN] = QuantScheme(bits=4, group_size=32)
    outcome = quantize_layer(Smoothed(Rtn(), 0.8), context, schemes)
    assert not torch.equal(context.layer.input_layernorm.weight, before)  # type: ignore[union-attr, arg-type]
    assert {report.fallback for report in outcome.reports} == {None}


def test_an_option_of_the_method_reaches_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    plain = gptq.round_layer

    def spied(context: Any, rounder: Any, true_sequential: bool = False) -> Any:
        seen.append(true_sequential)
        return plain(context, rounder, true_sequential=true_sequential)

    monkeypatch.setattr(gptq, "round_layer", spied)
    context = layer_context(tiny("llama"))
    schemes = dict.fromkeys(context.targets, context.scheme)
    schemes[DOWN] = QuantScheme(bits=8, group_size=32)
    quantize_layer(Gptq(true_sequential=True), context, schemes)
    assert seen == [True, True]
