"""SmoothQuant and W8A8: the paper's scales, an unchanged function, inputs that round better."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qdeploy.errors import UsageError
from qdeploy.quantization.hessian import AbsoluteMax
from qdeploy.quantization.method import LayerContext
from qdeploy.quantization.methods import METHODS, method_for
from qdeploy.quantization.numerics import fake_quantize
from qdeploy.quantization.scheme import fp8_scheme, w8a8_scheme
from qdeploy.quantization.smoothquant import (
    ALPHAS,
    Alpha,
    Smoothed,
    round_rows,
    smooth_layer,
    smoothing_scales,
)
from qdeploy.recipes import parse_recipe
from quantization.layer_contexts import layer_context, tiny
from tiny_models import ARCHITECTURES


def test_equation_4() -> None:
    x, w = torch.tensor([8.0, 0.5, 0.0]), torch.tensor([2.0, 4.0, 1.0])
    expected = [8**0.8 / 2**0.2, 0.5**0.8 / 4**0.2, 1.0]  # a feature never seen stays
    assert smoothing_scales(x, w, 0.8).tolist() == pytest.approx(expected)
    assert smoothing_scales(x, w, 1.0).tolist() == pytest.approx([8, 0.5, 1])


def test_absolute_max_is_over_all_calls() -> None:
    seen = AbsoluteMax()
    with pytest.raises(ValueError, match="no rows"):
        _ = seen.max
    seen(torch.tensor([[1.0, -5.0]]))
    seen(torch.tensor([[[-3.0, 2.0]]]))
    assert seen.max.tolist() == [3, 5]


def rounded_outputs(context: LayerContext) -> Tensor:
    """The layer's output when every linear's inputs are rounded to 8 bits per token."""

    def hook(module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        scale = inputs[0].abs().amax(-1, keepdim=True).clamp(min=1e-9) / 127
        return ((inputs[0] / scale).round() * scale,)

    modules = (context.linear(name) for name in context.targets)
    handles = [module.register_forward_pre_hook(hook) for module in modules]
    assert context.forward is not None
    outputs = torch.cat([output.flatten() for output in context.forward()])
    for handle in handles:
        handle.remove()
    return outputs


@pytest.mark.parametrize("alpha", [0.8, "auto"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_smoothing_keeps_the_function_and_helps_rounded_inputs(arch: str, alpha: Alpha) -> None:
    context = layer_context(tiny(arch), scheme=w8a8_scheme())
    assert context.forward is not None
    exact = torch.cat([output.flatten() for output in context.forward()])
    before = (rounded_outputs(context) - exact).norm()
    dense = smooth_layer(context, alpha)
    after = torch.cat([output.flatten() for output in context.forward()])
    assert (after - exact).norm() < 1e-4 * exact.norm()
    assert (rounded_outputs(context) - exact).norm() < before
    norms = {"input_layernorm.weight", "post_attention_layernorm.weight"}
    if arch == "gemma3_text":  # its own query and key norms make smoothing of q and k worse
        norms = {"pre_feedforward_layernorm.weight"}
    assert set(dense) == norms


def loss(context: LayerContext) -> float:
    """Error of every linear's outputs, inputs and weights rounded, relative, summed."""
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> None:
        def hook(_: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
            seen[name] = inputs[0].flatten(0, -2)

        handles.append(context.linear(name).register_forward_pre_hook(hook))

    handles: list[torch.utils.hooks.RemovableHandle] = []
    for name in context.targets:
        keep(name)
    context.layer(context.search_batches[0].hidden, **context.search_batches[0].kwargs)
    for handle in handles:
        handle.remove()
    total = 0.0
    for name, rows in seen.items():
        weight = context.linear(name).weight.detach()
        exact = rows @ weight.t()
        found = round_rows(rows) @ fake_quantize(weight, context.scheme).t()
        total += ((found - exact).norm() / exact.norm()).square().item()
    return total


@torch.no_grad()
def test_searched_smoothing_is_at_least_as_good_as_any_one_alpha() -> None:
    def smoothed(alpha: Alpha | None) -> float:
        context = layer_context(tiny("llama"), scheme=w8a8_scheme(), tokens=64)
        if alpha is not None:
            smooth_layer(context, alpha)
        return loss(context)

    best = smoothed("auto")
    others = [smoothed(alpha) for alpha in (None, *ALPHAS)]
    assert best <= 1.05 * min(others)
    assert best < 0.9 * others[0]


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_a_smoothed_method_returns_the_next_layers_inputs(method: str) -> None:
    context = layer_context(tiny("llama"), scheme=w8a8_scheme())
    assert context.forward is not None
    exact = context.forward()
    outcome = method_for(method, context.scheme, 0.8).quantize_layer(context)
    assert set(outcome.linears) == set(context.targets)
    assert all(q.scales.shape[1] == 1 for q in outcome.linears.values())
    assert len(outcome.outputs) == len(exact)
    for found, expected in zip(outcome.outputs, exact, strict=True):
        assert (found - expected).norm() < 0.1 * expected.norm()


def test_q16_gemmas_huge_activations_are_smoothed_and_rounded() -> None:
    """One feature of the MLP's input is 10,000 times the others."""
    model = tiny("gemma3_text")
    model.model.layers[0].pre_feedforward_layernorm.weight.data[5] = 1e4
    context = layer_context(model, scheme=w8a8_scheme())
    assert context.forward is not None
    exact = torch.cat([output.flatten() for output in context.forward()])
    outcome = method_for("gptq", context.scheme, 0.8).quantize_layer(context)
    assert (rounded_outputs(context) - exact).norm() < 0.15 * exact.norm()
    for report in outcome.reports:
        assert report.fallback is None
        assert report.loss is not None
    assert all(q.dequantize().isfinite().all() for q in outcome.linears.values())


def test_the_method_of_a_scheme() -> None:
    assert method_for("gptq", w8a8_scheme(), None) == METHODS.get("gptq")
    smoothed = method_for("rtn", w8a8_scheme(), 0.5)
    assert isinstance(smoothed, Smoothed)
    assert smoothed.needs_calibration
    with pytest.raises(UsageError, match="smoothing groups"):
        smoothed.check("olmo")
    assert not method_for("fp8", fp8_scheme("FP8_DYNAMIC"), None).needs_calibration
    assert method_for("fp8", fp8_scheme("FP8"), None).needs_calibration


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({"scheme": "W8A8"}, "W8A8 needs method rtn or gptq, not awq"),
        ({"scheme": "FP8", "method": "gptq"}, "FP8 needs method fp8, not gptq"),
        ({"scheme": "W8A8", "method": "rtn", "bits": 8}, "bits has no effect on scheme W8A8"),
        ({"smoothquant": 0.5}, "smoothquant is for scheme W8A8"),
        ({"scheme": "W8A8", "method": "rtn", "smoothquant": 2}, "smoothquant"),
        ({"scheme": "W8A8", "method": "rtn", "smoothquant": "of"}, "smoothquant"),
    ],
)
def test_recipes_that_contradict_themselves(recipe: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_recipe(recipe, "test")


@pytest.mark.parametrize(
    ("value", "alpha"), [(None, "auto"), ("auto", "auto"), (0.5, 0.5), (0, 0.0), ("off", None)]
)
def test_alpha(value: object, alpha: object) -> None:
    recipe = parse_recipe({"scheme": "W8A8", "method": "rtn", "smoothquant": value}, "test")
    assert recipe.alpha == alpha
    assert recipe.calibrates == (alpha is not None)
