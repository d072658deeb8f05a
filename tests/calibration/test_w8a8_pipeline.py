"""W8A8 and static FP8 end to end on tiny models: files, config, readers, command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from qdeploy.cli.quantize import _override, _refuse_unused, _scheme_flags
from qdeploy.errors import UsageError
from qdeploy.formats.checkpoint import open_checkpoint
from qdeploy.formats.inspect import inspect_artifact
from qdeploy.formats.manifest import read_manifest
from qdeploy.pipeline import QuantizeResult, quantize_checkpoint
from qdeploy.quantization.scheme import QuantizedLinear
from qdeploy.recipes import Recipe, parse_recipe
from qdeploy.runtime.llm import LLM, SamplingParams
from tiny_models import tiny_checkpoint

DATA = {"samples": 6, "seqlen": 48}
LAYER = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama") / "model")


def quantize(source: Path, out: Path, **recipe: Any) -> QuantizeResult:
    return quantize_checkpoint(str(source), out, parse_recipe(recipe | {"calibration": DATA}, "t"))


def config_group(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    group: dict[str, Any] = config["config_groups"]["group_0"]
    return group


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_w8a8_is_written_as_int_quantized_and_served(
    method: str, llama: Path, tmp_path: Path
) -> None:
    result = quantize(llama, tmp_path / "out", method=method, scheme="W8A8")
    assert (result.scheme, result.format) == ("W8A8", "compressed-tensors")
    group = config_group(tmp_path / "out")
    assert group["format"] == "int-quantized"
    assert (group["weights"]["strategy"], group["weights"]["num_bits"]) == ("channel", 8)
    assert (group["input_activations"]["strategy"], group["input_activations"]["dynamic"]) == (
        "token",
        True,
    )
    checkpoint = open_checkpoint(tmp_path / "out")
    assert checkpoint.tensor(f"{LAYER}.weight").dtype == torch.int8
    assert checkpoint.tensor(f"{LAYER}.weight_scale").shape == (64, 1)
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None
    assert manifest.recipe["smoothquant"] == "auto"
    assert manifest.calibration is not None
    norm = "model.layers.1.input_layernorm.weight"
    assert not torch.equal(checkpoint.tensor(norm), open_checkpoint(llama).tensor(norm))
    same = {"prompt_token_ids": list(range(20))}
    params = SamplingParams(max_tokens=4, temperature=0)
    found = LLM(tmp_path / "out", max_model_len=64, backend="reference").generate([same], params)
    base = LLM(llama, max_model_len=64, backend="reference").generate([same], params)
    assert found[0].outputs[0].token_ids == base[0].outputs[0].token_ids


def test_without_smoothing_nothing_is_calibrated(llama: Path, tmp_path: Path) -> None:
    quantize(llama, tmp_path / "out", method="rtn", scheme="W8A8", smoothquant="off")
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None
    assert manifest.calibration is None
    assert manifest.recipe["smoothquant"] == "off"
    norm = "model.layers.1.input_layernorm.weight"
    folders = open_checkpoint(tmp_path / "out"), open_checkpoint(llama)
    assert torch.equal(folders[0].tensor(norm), folders[1].tensor(norm))


def test_fp8_has_one_scale_for_each_weight_and_its_inputs(llama: Path, tmp_path: Path) -> None:
    result = quantize(llama, tmp_path / "out", method="fp8", scheme="FP8")
    assert (result.scheme, result.format) == ("FP8", "compressed-tensors")
    group = config_group(tmp_path / "out")
    assert group["weights"]["strategy"] == group["input_activations"]["strategy"] == "tensor"
    assert group["input_activations"]["dynamic"] is False
    checkpoint = open_checkpoint(tmp_path / "out")
    assert checkpoint.tensor(f"{LAYER}.weight_scale").shape == (1,)
    q = checkpoint.linear(LAYER)
    assert isinstance(q, QuantizedLinear)
    assert q.input_scale is not None
    scales = {
        name: checkpoint.tensor(f"model.layers.1.{name}.input_scale").item()
        for name in ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.down_proj")
    }
    assert scales["self_attn.q_proj"] == scales["self_attn.v_proj"]
    assert len(set(scales.values())) == 3
    assert q.input_scale.item() == scales["mlp.down_proj"] > 0
    weight = open_checkpoint(llama).weight(LAYER)
    assert (q.dequantize() - weight).norm() < 0.05 * weight.norm()
    inspection = inspect_artifact(tmp_path / "out")
    assert not inspection.findings
    assert inspection.activations is not None
    assert "by a stored scale" in inspection.activations


@pytest.mark.parametrize("format", ["gptq", "gptq_v2", "awq"])
def test_formats_that_say_nothing_of_activations_refuse(
    format: str, llama: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=r"W8A8.*--format compressed-tensors"):
        quantize(llama, tmp_path / "out", method="rtn", scheme="W8A8", format=format)


def resolve(recipe: Recipe, **given: Any) -> Recipe:
    """What the command line makes of a recipe and flags."""
    flags: dict[str, Any] = dict.fromkeys(Recipe.model_fields)
    flags |= {"kv_cache": {}, "calibration": dict.fromkeys(("source", "samples", "seqlen", "seed"))}
    flags |= given
    flags.update(_scheme_flags(flags))
    resolved = _override(recipe, flags)
    _refuse_unused(resolved, flags)
    return resolved


def test_flags_replace_a_recipes_scheme_of_another_kind() -> None:
    awq = parse_recipe({"method": "awq", "group_size": 64, "format": "awq"}, "test")
    w8a8 = resolve(awq, method="gptq", scheme="W8A8")
    assert (w8a8.scheme, w8a8.bits, w8a8.group_size, w8a8.format) == ("W8A8", 4, "auto", "auto")
    back = resolve(w8a8, scheme="W4A16")
    assert (back.scheme, back.bits, back.symmetric, back.smoothquant) == (None, 4, True, None)
    static = resolve(back, method="fp8", scheme="FP8")
    assert (static.scheme, static.alpha) == ("FP8", None)
    assert resolve(static, calibration={"samples": 3, "source": None, "seqlen": None, "seed": None})


def test_calibration_flags_without_calibration_are_refused() -> None:
    section = {"samples": 3, "source": None, "seqlen": None, "seed": None}
    for recipe in ({"method": "rtn"}, {"method": "rtn", "scheme": "W8A8", "smoothquant": "off"}):
        with pytest.raises(UsageError, match="--calib-samples has no effect"):
            resolve(parse_recipe(recipe, "test"), calibration=section)
    kv = parse_recipe({"method": "none", "kv_cache": {"dtype": "auto"}}, "test")
    assert resolve(kv, calibration=section).calibration.samples == 3


@pytest.mark.parametrize("given", [{"method": "awq"}, {"method": "fp8"}, {"method": "none"}])
def test_another_method_forgets_w8a8(given: dict[str, Any]) -> None:
    recipe = parse_recipe(
        {"method": "gptq", "scheme": "W8A8", "smoothquant": 0.5, "overrides": {"*": {"bits": 4}}},
        "t",
    )
    found = resolve(recipe, **given)
    assert (found.method, found.scheme, found.smoothquant) == (given["method"], None, None)
    dynamic = resolve(recipe, method="fp8", scheme="FP8_DYNAMIC")
    assert (dynamic.scheme, dynamic.smoothquant) == ("FP8_DYNAMIC", None)
    with pytest.raises(UsageError, match="needs method rtn or gptq"):
        resolve(recipe, method="awq", scheme="W8A8")


def test_passes_are_for_methods_with_second_moments() -> None:
    with pytest.raises(UsageError, match="--one-pass are for methods"):
        resolve(Recipe(method="rtn"), true_sequential=False)
