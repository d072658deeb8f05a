"""Folding scales changes no function: every architecture, GQA, (1 + w) norms, biases, bfloat16."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qdeploy.errors import UsageError
from qdeploy.quantization.smoothing import (
    GROUPS,
    expand_heads,
    fold,
    share_heads,
    smoothing_groups,
)
from quantization.layer_contexts import tiny
from tiny_models import ARCHITECTURES, tiny_config, tiny_model


def random_scales(rows: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(rows, generator=generator).mul(3).sub(1.5).exp()


def fold_all(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> None:
    head_dim = model.config.head_dim
    for index, layer in enumerate(model.model.layers):
        for number, group in enumerate(smoothing_groups(model.config.model_type)):
            source = layer.get_submodule(group.source)
            scales = random_scales(source.weight.shape[0], 10 * index + number)
            fold(layer, group, scales, head_dim, dtype)


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    ids = torch.arange(40).unsqueeze(0) * 7 % model.config.vocab_size
    return model(ids).logits


@pytest.mark.parametrize("arch", GROUPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_q22_logits_unchanged(arch: str, dtype: torch.dtype) -> None:
    model = tiny(arch)
    before = logits(model)
    name = smoothing_groups(arch)[-1].balance[-1]
    weight = model.model.layers[0].get_submodule(name).weight.clone()
    fold_all(model, dtype)
    assert not torch.equal(weight, model.model.layers[0].get_submodule(name).weight)
    torch.testing.assert_close(logits(model), before, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("arch", ["llama", "gemma3_text"])
def test_bfloat16_norms_hold_exactly_what_is_stored(arch: str) -> None:
    model = tiny(arch)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    fold_all(model, torch.bfloat16)
    group = smoothing_groups(arch)[0 if arch == "llama" else 1]
    weight = model.model.layers[0].get_submodule(group.source).weight
    assert torch.equal(weight, weight.bfloat16().float())


def test_q21_biases_are_divided_too() -> None:
    model = tiny_model("llama", attention_bias=True, mlp_bias=True)
    before = logits(model)
    bias = model.model.layers[0].self_attn.v_proj.bias.clone()
    fold_all(model)
    torch.testing.assert_close(logits(model), before, atol=1e-3, rtol=1e-3)
    assert not torch.equal(bias, model.model.layers[0].self_attn.v_proj.bias)


def test_one_kv_head_and_all_kv_heads() -> None:
    for heads in (1, 4):
        model = tiny_model("llama", num_key_value_heads=heads)
        before = logits(model)
        fold_all(model)
        torch.testing.assert_close(logits(model), before, atol=1e-3, rtol=1e-3)


def test_query_heads_share_the_scale_of_their_kv_head() -> None:
    group = smoothing_groups("llama")[1]
    columns = torch.arange(12.0)  # 6 query heads of 2 features, 2 KV heads: 3 query heads each
    shared = share_heads(columns, group, 4, 2)
    assert shared.tolist() == [2.0, 3.0, 8.0, 9.0]
    assert expand_heads(shared, 12, 2).tolist() == [2, 3, 2, 3, 2, 3, 8, 9, 8, 9, 8, 9]


def test_zero_norm_weights_are_left_alone() -> None:
    model = tiny_model("llama")
    model.model.layers[0].input_layernorm.weight.data[:3] = 0
    model.model.layers[1].post_attention_layernorm.weight.data[5] = 1e-30
    before = logits(model)
    fold_all(model, torch.float16)
    after = logits(model)
    assert after.isfinite().all()
    torch.testing.assert_close(after, before, atol=1e-3, rtol=1e-3)


def test_every_architecture_of_the_runtime_has_groups() -> None:
    assert set(ARCHITECTURES) <= set(GROUPS)


@pytest.mark.parametrize("arch", GROUPS)
def test_groups_name_modules_that_exist(arch: str) -> None:
    layer = tiny_model(arch).model.layers[0]
    for group in GROUPS[arch]:
        for name in group.balance:
            assert isinstance(layer.get_submodule(name), nn.Linear)
        assert isinstance(layer.get_submodule(group.source), nn.Module)


def test_gemma3_keeps_its_attention_norm() -> None:
    sources = [group.source for group in smoothing_groups("gemma3_text")]
    assert "input_layernorm" not in sources
    assert tiny_config("gemma3_text").model_type == "gemma3_text"


def test_unknown_architecture_names_another_method() -> None:
    with pytest.raises(UsageError, match=r"'phi'.*--method gptq"):
        smoothing_groups("phi")
