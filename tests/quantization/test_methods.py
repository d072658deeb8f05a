"""AWQ, GPTQ and RTN on decoder layers of tiny models."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from qdeploy.errors import CalibrationError
from qdeploy.quantization import awq_scales, smoothing
from qdeploy.quantization.awq import Awq
from qdeploy.quantization.awq_clip import clip_qparams
from qdeploy.quantization.awq_scales import candidates, scale_layer, search_scales
from qdeploy.quantization.gptq import Gptq, GptqRounder
from qdeploy.quantization.hessian import Hessian
from qdeploy.quantization.method import LayerContext, LayerOutcome
from qdeploy.quantization.methods import METHODS
from qdeploy.quantization.numerics import (
    dequantize,
    fake_quantize,
    grouped_range,
    quantize,
    range_qparams,
)
from qdeploy.quantization.rtn import Rtn, rtn_quantize
from qdeploy.quantization.scheme import QuantScheme
from qdeploy.quantization.smoothing import GROUPS
from quantization.layer_contexts import layer_context, tiny


@torch.no_grad()
def outputs(context: LayerContext) -> Tensor:
    assert context.forward is not None
    return torch.cat([tensor.reshape(-1, tensor.shape[-1]) for tensor in context.forward()])


@torch.no_grad()
def install(context: LayerContext, outcome: LayerOutcome) -> None:
    """Put what is written to disk into the layer."""
    for name, q in outcome.linears.items():
        context.linear(name).weight.copy_(q.dequantize())
        if q.bias is not None:
            context.linear(name).bias.copy_(q.bias)
    for name, tensor in outcome.dense.items():
        context.layer.get_parameter(name).copy_(tensor)


def layer_error(arch: str, method: object) -> float:
    context = layer_context(tiny(arch))
    before = outputs(context)
    outcome = method.quantize_layer(context)  # type: ignore[attr-defined]
    assert set(outcome.linears) == set(context.targets)
    assert [report.name for report in outcome.reports if report.loss is not None]
    install(context, outcome)
    return (outputs(context) - before).square().mean().item()


@pytest.mark.parametrize("arch", GROUPS)
def test_awq_and_gptq_beat_rtn_on_the_layers_output(arch: str) -> None:
    nearest = layer_error(arch, Rtn())
    scaled, compensated = layer_error(arch, Awq()), layer_error(arch, Gptq())
    assert scaled < nearest
    assert compensated < nearest
    assert layer_error(arch, METHODS.get("awq+gptq")) < 1.1 * min(scaled, compensated)


def salient(features: int) -> tuple[Tensor, Tensor]:
    """A weight [32, features], and mean |x| of features of which some are much larger."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(32, features, generator=generator)
    return weight, torch.rand(features, generator=generator).mul(4).exp()


@pytest.mark.parametrize("symmetric", [False, True])
def test_awq_scales_lower_the_cost_and_never_lose_to_identity(symmetric: bool) -> None:
    weight, x = salient(64)
    scheme = QuantScheme(bits=4, group_size=32, symmetric=symmetric)
    tries = candidates(x, weight.abs().mean(0))
    choice = search_scales(weight, x.square(), scheme, tries, 16)
    assert choice is not None
    assert choice.loss < 0.8 * choice.identity_loss
    error = fake_quantize(weight, scheme) - weight
    expected = (error.square() * x.square()).sum().item()
    assert choice.identity_loss == pytest.approx(expected, rel=1e-5)
    # A scale that belongs to the features the other way round is worse than none.
    backwards = iter([torch.ones(64), 1 / choice.scales])
    kept = search_scales(weight, x.square(), scheme, backwards, 16)
    assert kept is not None
    assert torch.equal(kept.scales, torch.ones(64))


def test_grid_has_identity_and_both_of_awqs_own_grids() -> None:
    x, w = torch.tensor([1.0, 4.0]), torch.tensor([1.0, 0.25])
    tries = list(candidates(x, w))
    assert len(tries) == 45
    torch.testing.assert_close(tries[0], torch.ones(2))
    ratios = [float(scales[1] / scales[0]) for scales in tries]
    for power in (0.25, 0.5, 1.0):
        assert any(ratio == pytest.approx(4**power, rel=1e-3) for ratio in ratios)  # b = 0
    duo = 4**0.5 / 0.25**0.5
    assert any(ratio == pytest.approx(duo, rel=1e-2) for ratio in ratios)
    assert all(torch.isfinite(scales).all() for scales in candidates(torch.zeros(2), w))


def test_gptq_knows_what_later_columns_make_up_for() -> None:
    """Of two equal features the error of one costs nothing that the other can't repair."""
    inputs = torch.randn(500, 16, generator=torch.Generator().manual_seed(0))
    inputs[:, 9] = inputs[:, 3] + 0.01 * torch.randn(500)
    hessian = inputs.t() @ inputs / 500
    scheme = QuantScheme(bits=4, group_size=8)
    costs = METHODS.get("awq+gptq").rounder.importance(hessian, scheme)  # type: ignore[attr-defined]
    nearest = Awq().rounder.importance(hessian, scheme)
    torch.testing.assert_close(nearest, hessian.diagonal() * 1.01, rtol=1e-2, atol=0)
    assert costs[[3, 9]].min() < 0.05 * nearest[3]
    assert (costs <= nearest * (1 + 1e-4)).all()


def test_q02_every_loss_not_finite_keeps_scale_one_with_a_named_warning() -> None:
    warnings: list[str] = []
    context = layer_context(tiny("llama"), 2, warn=warnings.append)
    # Larger than float32 squares: every candidate's loss is inf or NaN.
    context.linear("mlp.down_proj").weight.data.mul_(1e30)
    context.linear("mlp.up_proj").weight.data.mul_(1e8)
    outcome = Awq().quantize_layer(context)
    assert any("model.layers.2" in text and "mlp.up_proj" in text for text in warnings)
    for q in outcome.linears.values():
        assert q.dequantize().isfinite().all()


@pytest.mark.parametrize("method", [Awq(), Gptq(), METHODS.get("awq+gptq"), Rtn()])
def test_q01_tiny_weights_stay_finite(method: object) -> None:
    """A gate_proj group of 1e-9 is 0 in float16: statistics are float32 throughout."""
    context = layer_context(tiny("llama"))
    context.linear("mlp.gate_proj").weight.data[:, :32] *= 1e-9
    outcome = method.quantize_layer(context)  # type: ignore[attr-defined]
    for q in outcome.linears.values():
        assert q.scales.isfinite().all()
        assert (q.scales > 0).all()
        assert q.dequantize().isfinite().all()
    assert all(tensor.isfinite().all() for tensor in outcome.dense.values())


def test_q06_eight_tokens_are_enough_to_run() -> None:
    for method in (Awq(), Gptq(), METHODS.get("awq+gptq")):
        outcome = method.quantize_layer(layer_context(tiny("llama"), tokens=8))
        assert all(q.dequantize().isfinite().all() for q in outcome.linears.values())


def test_a_wrong_fold_is_noticed() -> None:
    """Gemma's norm folded as w / s, not (1 + w) / s − 1."""
    context = layer_context(tiny("gemma3_text"))
    wrong = tuple(dataclasses.replace(g, offset=False) for g in smoothing.GROUPS["gemma3_text"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(awq_scales, "smoothing_groups", lambda model_type: wrong)
        with pytest.raises(CalibrationError, match=r"model\.layers\.0: folding scales changed"):
            Awq().quantize_layer(context)


def test_gptq_feeds_on_quantized_inputs_and_names_the_error() -> None:
    context = layer_context(tiny("llama"))
    outcome = Gptq().quantize_layer(context)
    assert torch.equal(torch.cat(outcome.outputs), torch.cat(context.forward()))  # type: ignore[misc]
    assert {report.dampening for report in outcome.reports} == {0.01}
    assert list(context.input_groups) == [
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        ("self_attn.o_proj",),
        ("mlp.gate_proj", "mlp.up_proj"),
        ("mlp.down_proj",),
    ]


@pytest.mark.parametrize("method", [Awq(true_sequential=True), Gptq(true_sequential=True)])
def test_true_sequential_shows_each_linear_what_quantized_ones_give(method: Awq | Gptq) -> None:
    """Its H of down_proj is that of the finished layer; one pass has that of an earlier state."""

    def last_losses(method: Awq | Gptq) -> tuple[float, float]:
        context = layer_context(tiny("llama"))
        before = context.linear("mlp.down_proj").weight.detach().clone()
        if isinstance(method, Awq):
            before = before * scaled_columns(context)
        outcome = method.quantize_layer(context)
        hessian = Hessian()
        context.forward({"mlp.down_proj": hessian})  # type: ignore[misc]
        error = outcome.linears["mlp.down_proj"].dequantize() - before
        reported = next(r.loss for r in outcome.reports if r.name == "mlp.down_proj")
        assert reported is not None
        return reported, ((error @ hessian.matrix) * error).sum().item() / len(error)

    reported, actual = last_losses(method)
    assert reported == pytest.approx(actual, rel=1e-3)
    reported, actual = last_losses(dataclasses.replace(method, true_sequential=False))
    assert reported != pytest.approx(actual, rel=1e-3)


def scaled_columns(context: LayerContext) -> Tensor:
    """What AWQ multiplies the columns of down_proj by."""
    other = layer_context(tiny("llama"))
    before = other.linear("mlp.down_proj").weight.detach().clone()
    scale_layer(other, Awq().rounder.importance)
    return (other.linear("mlp.down_proj").weight / before).mean(0)


def test_q16_a_linear_that_rounding_ruins_is_named() -> None:
    warnings: list[str] = []
    scheme = QuantScheme(bits=2, group_size=32, symmetric=True)
    context = layer_context(tiny("llama"), scheme=scheme, warn=warnings.append)
    # Two bits can't hold one huge weight beside those that matter.
    weight = context.linear("mlp.down_proj").weight.data
    weight[:, ::32] = 1e4 * weight.abs().max()
    context.linear("mlp.up_proj").weight.data[::32] = 0
    Gptq(rounder=GptqRounder(search=False, rounds=0)).quantize_layer(context)
    assert any("model.layers.0.mlp.down_proj: rounding errors are" in text for text in warnings)
    assert not any("q_proj" in text for text in warnings)


def test_gptq_without_a_factor_reports_rtn() -> None:
    warnings: list[str] = []
    context = layer_context(tiny("llama"), warn=warnings.append)
    context.layer.get_submodule("post_attention_layernorm").weight.data[0] = 1e30
    outcome = Gptq().quantize_layer(context)
    fallbacks = {report.name for report in outcome.reports if report.fallback == "rtn"}
    assert {"mlp.gate_proj", "mlp.up_proj"} <= fallbacks
    assert "self_attn.q_proj" not in fallbacks
    assert any("mlp.gate_proj" in text for text in warnings)


def test_awq_leaves_an_ignored_layer_dense_and_scaled() -> None:
    context = layer_context(tiny("llama"))
    before = outputs(context)
    kept = tuple(name for name in context.targets if name != "self_attn.q_proj")
    groups = tuple(tuple(n for n in names if n in kept) for names in context.input_groups)
    context = dataclasses.replace(context, targets=kept, input_groups=groups)
    outcome = Awq().quantize_layer(context)
    assert "self_attn.q_proj.weight" in outcome.dense
    assert "self_attn.q_proj" not in outcome.linears
    install(context, outcome)
    assert (outputs(context) - before).square().mean() < layer_error("llama", Rtn())


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [False, True])
def test_codes_belong_to_the_float16_scale(bits: int, symmetric: bool) -> None:
    scheme = QuantScheme(bits=bits, group_size=16, symmetric=symmetric)  # type: ignore[arg-type]
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    q = rtn_quantize(weight, scheme)
    assert q.scales.dtype == torch.float16
    again = quantize(weight, q.scales, q.zero_points, scheme)
    assert torch.equal(again, q.codes)
    assert torch.equal(fake_quantize(weight, scheme), q.dequantize())
    if symmetric:
        largest = weight.view(8, 4, 16).abs().amax(-1)
        expected = (2 * largest / scheme.max_code).half()
        assert torch.equal(q.scales, expected)


def test_clipping_never_raises_the_error_it_measures() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(16, 64, generator=generator)
    inputs = torch.randn(100, 4, 16, generator=generator)
    moments = torch.einsum("tgi,tgj->gij", inputs, inputs)
    scheme = QuantScheme(bits=3, group_size=16)

    def error(scales: Tensor, zeros: Tensor) -> Tensor:
        codes = quantize(weight, scales, zeros, scheme)
        difference = (dequantize(codes, scales, zeros) - weight).view(16, 4, 16)
        return torch.einsum("ogi,gij,ogj->og", difference, moments, difference)

    clipped = error(*clip_qparams(weight, scheme, moments))
    plain = error(*range_qparams(*grouped_range(weight, scheme), scheme))
    assert (clipped <= plain * (1 + 1e-4)).all()
    assert clipped.sum() < 0.97 * plain.sum()


def test_a_constant_layer_is_exact() -> None:
    linear = nn.Linear(32, 32)
    q = rtn_quantize(torch.zeros_like(linear.weight), QuantScheme(group_size=32))
    assert (q.dequantize() == 0).all()
