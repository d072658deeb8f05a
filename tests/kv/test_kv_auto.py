"""KV policies and static scales from data, checkpoint to served artifact, on tiny models."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from qdeploy.calibration.attention import observe_attention
from qdeploy.calibration.layers import LayerRunner
from qdeploy.errors import CalibrationError, UsageError
from qdeploy.formats.checkpoint import open_checkpoint
from qdeploy.formats.hf import open_folder
from qdeploy.formats.inspect import inspect_artifact
from qdeploy.formats.manifest import Manifest, read_manifest
from qdeploy.kv.auto import MAX_ERROR, KVLayerStats, candidates, choose
from qdeploy.kv.config import KVCacheConfig, LayerPolicy
from qdeploy.pipeline import quantize_checkpoint
from qdeploy.progress import Silent
from qdeploy.recipes import parse_recipe
from qdeploy.runtime.llm import LLM, SamplingParams
from tiny_models import ARCHITECTURES, tiny_checkpoint, tiny_model

DATA = {"samples": 6, "seqlen": 96}
AUTO = {"dtype": "auto", "block_size": 16}


def quantize(source: Path, out: Path, **recipe: Any) -> Manifest:
    data = {"method": "none", "kv_cache": AUTO, "calibration": DATA} | recipe
    quantize_checkpoint(str(source), out, parse_recipe(data, "test"), overwrite=out.exists())
    manifest = read_manifest(out)
    assert manifest is not None
    return manifest


def stats(errors: dict[str, float]) -> KVLayerStats:
    return KVLayerStats(
        layer=3, tokens=1, k_amax=(1.0,), v_amax=(1.0,), k_spread=1.0, errors=errors, tried=1
    )


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ((0.09, 0.05, 0.01, 0.0), ("int4", 1, 0)),
        ((0.11, 0.05, 0.01, 0.0), ("k8v4", 1, 0)),
        ((9.0, 0.2, 0.1, 0.0), ("int8", 1, 0)),
        ((9.0, 9.0, 0.2, 0.05), ("int8", 2, 1)),
        ((9.0, 9.0, 9.0, 9.0), ("bf16", 1, 0)),
        ((math.nan, math.nan, 0.02, 0.0), ("int8", 1, 0)),
    ],
)
def test_the_cheapest_policy_within_the_limit_is_chosen(
    errors: tuple[float, ...], expected: tuple[str, int, int]
) -> None:
    assert MAX_ERROR == 0.1
    base = KVCacheConfig(dtype="bf16", block_size=16)
    keys = [config.key for config in candidates(base)]
    policy = choose(stats(dict(zip(keys, errors, strict=True))), base)
    assert (policy.dtype, policy.sink_blocks, policy.residual_blocks) == expected
    assert policy.layer == 3


def test_the_most_frequent_policy_is_the_models_and_named_layers_stay() -> None:
    section = parse_recipe({"kv_cache": AUTO | {"layers": {1: "bf16"}}}, "test").kv_cache

    def policy(layer: int, dtype: str) -> LayerPolicy:
        return LayerPolicy(layer=layer, dtype=dtype, sink_blocks=1, residual_blocks=0)

    chosen = [policy(0, "k8v4"), policy(1, "int4"), policy(2, "int4"), policy(3, "int4")]
    assert section.config(chosen).key == "int4/b16/s1/r0+0=k8v4/s1/r0+1=bf16/s1/r0"


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen2.5's defect (llama.cpp 21385): keys of the first and the last layer have huge biases."""
    folder = tmp_path_factory.mktemp("biased") / "model"
    source = tiny_checkpoint("qwen2", folder, num_hidden_layers=5)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    for index in (0, 4):
        bias = model.model.layers[index].self_attn.k_proj.bias
        generator = torch.Generator().manual_seed(index)
        bias.data = torch.randn(bias.shape, generator=generator) * 40
    model.save_pretrained(source)
    return source


def test_layers_with_huge_key_biases_get_more_bits_and_no_others(
    biased: Path, tmp_path: Path
) -> None:
    manifest = quantize(biased, tmp_path / "out")
    policy = manifest.kv_cache.config()
    assert policy.dtype == "int4"
    assert [item.layer for item in policy.layers] == [0, 4]
    assert all(item.dtype in ("k8v4", "int8", "bf16") for item in policy.layers)
    found = manifest.kv_cache.statistics
    assert [record.layer for record in found] == list(range(5))
    loud = [record.layer for record in found if record.errors["int4/b16/s1/r0"] > MAX_ERROR]
    assert loud == [0, 4]
    assert max(found[0].k_amax) > 10 * max(found[1].k_amax)
    assert manifest.calibration is not None  # method none, and calibrated all the same
    assert LLM(tmp_path / "out", max_model_len=64).engine.executor.kv_config == policy
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"layer 4: {policy.layers[-1].dtype}" in card
    assert any("layer" in line for line in inspect_artifact(tmp_path / "out").lines())


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_q23_a15_a17_every_layer_has_scales_of_its_own(arch: str, tmp_path: Path) -> None:
    """Also the sliding layers of Gemma, and whatever the method makes of the weights."""
    source = tiny_checkpoint(arch, tmp_path / "model")
    manifest = quantize(
        source, tmp_path / "out", method="fp8", scheme="FP8_DYNAMIC", kv_cache={"dtype": "fp8"}
    )
    checkpoint = open_checkpoint(tmp_path / "out")
    count = checkpoint.config["num_hidden_layers"]
    scheme = checkpoint.config["quantization_config"]["kv_cache_scheme"]
    assert (scheme["type"], scheme["num_bits"], scheme["strategy"]) == ("float", 8, "tensor")
    scales = {}
    for record in manifest.kv_cache.statistics:
        for name, exact in (("k", record.k_scale), ("v", record.v_scale)):
            stored = checkpoint.tensor(f"model.layers.{record.layer}.self_attn.{name}_scale")
            assert stored.shape == (1,)
            assert exact <= stored.item() <= exact * 1.01
            scales[record.layer, name] = stored.item()
    assert len(scales) == len(set(scales.values())) == 2 * count
    inspection = inspect_artifact(tmp_path / "out", verify=True)
    assert not inspection.findings
    assert inspection.to_json()["kv_scales"]["1"]["k"] == scales[1, "k"]
    assert any(
        line.startswith(f"static KV scales of {count} layers") for line in inspection.lines()
    )


def test_the_fp8_format_carries_scales_too_and_is_served(tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 8}
    source = tiny_checkpoint("llama", tmp_path / "model", num_key_value_heads=8, **sizes)
    recipe = {"method": "fp8", "scheme": "FP8_BLOCK", "kv_cache": {"dtype": "fp8"}}
    manifest = quantize(source, tmp_path / "out", **recipe)
    inspection = inspect_artifact(tmp_path / "out")
    assert (inspection.format, inspection.findings) == ("fp8", [])
    stored = [inspection.kv_scales[record.layer] for record in manifest.kv_cache.statistics]
    exact = [{"k": r.k_scale, "v": r.v_scale} for r in manifest.kv_cache.statistics]
    assert stored == [pytest.approx(scales) for scales in exact]  # float32, as the model is
    llm = LLM(tmp_path / "out", max_model_len=64)
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    result = llm.generate([{"prompt_token_ids": list(range(20))}], params)[0]
    assert len(result.outputs[0].token_ids) == 3


def test_statistics_are_of_rotated_keys_on_all_tokens(tmp_path: Path) -> None:
    """Against transformers' own cache, which holds keys after RoPE, in float32."""
    source = tiny_checkpoint("qwen3", tmp_path / "model")
    manifest = quantize(source, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    seen: list[list[tuple[Tensor, Tensor]]] = []
    for sequence in calibration_sequences(source):
        with torch.no_grad():
            cache = model(torch.tensor([sequence]), use_cache=True).past_key_values
        seen.append([(layer.keys, layer.values) for layer in cache.layers])
    for record in manifest.kv_cache.statistics:
        keys = [item[record.layer][0].abs().amax((0, 2, 3)) for item in seen]
        values = [item[record.layer][1].abs().amax((0, 2, 3)) for item in seen]
        assert record.k_amax == pytest.approx(torch.stack(keys).amax(0).tolist(), rel=0.01)
        assert record.v_amax == pytest.approx(torch.stack(values).amax(0).tolist(), rel=0.01)
        assert record.tokens == sum(item[0][0].shape[2] for item in seen)


def calibration_sequences(source: Path) -> list[list[int]]:
    from qdeploy.calibration.dataset import load_calibration
    from qdeploy.recipes import CalibrationSection
    from qdeploy.runtime.tokenizer import Tokenizer

    section = CalibrationSection(**DATA)  # type: ignore[arg-type]
    return load_calibration(section, Tokenizer.load(source)).sequences


@pytest.mark.parametrize("method", ["gptq", "rtn"])
def test_the_policy_changes_no_weight_and_a_killed_run_has_the_same(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny_checkpoint("llama", tmp_path / "model")
    recipe = {"method": method, "group_size": 32}
    plain = quantize(source, tmp_path / "plain", kv_cache={"dtype": "int8"}, **recipe)
    whole = quantize(source, tmp_path / "whole", **recipe)
    weights = [open_folder(tmp_path / name).weights_sha256() for name in ("plain", "whole")]
    assert weights[0] == weights[1]
    assert not plain.kv_cache.statistics
    assert len(whole.kv_cache.statistics) == 3

    original = LayerRunner.run

    def killed(self: LayerRunner, index: int, *inputs: Any) -> Any:
        if index == 1:
            raise KeyboardInterrupt
        return original(self, index, *inputs)

    monkeypatch.setattr(LayerRunner, "run", killed)
    with pytest.raises(KeyboardInterrupt):
        quantize(source, tmp_path / "resumed", **recipe)
    monkeypatch.undo()
    resumed = quantize(source, tmp_path / "resumed", **recipe)
    assert resumed.kv_cache == whole.kv_cache


def test_a15_missing_scales_are_found_only_where_they_are_announced(tmp_path: Path) -> None:
    source = tiny_checkpoint("llama", tmp_path / "model")
    recipe = {"method": "rtn", "group_size": 32, "symmetric": True}
    quantize(
        source, tmp_path / "int8", format="compressed-tensors", kv_cache={"dtype": "int8"}, **recipe
    )
    assert not inspect_artifact(tmp_path / "int8").findings
    config = json.loads((tmp_path / "int8/config.json").read_text())
    assert config["quantization_config"]["kv_cache_scheme"] is None
    config["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "dynamic": False}
    (tmp_path / "int8/config.json").write_text(json.dumps(config))
    findings = inspect_artifact(tmp_path / "int8").findings
    assert len(findings) == 6
    assert findings[0].startswith("layer 0: k_scale of the KV cache is missing")


def test_a_format_without_scales_says_where_they_are(tmp_path: Path) -> None:
    class Lines(Silent):
        def info(self, message: str) -> None:
            lines.append(message)

    lines: list[str] = []
    source = tiny_checkpoint("llama", tmp_path / "model")
    recipe = parse_recipe({"method": "none", "kv_cache": {"dtype": "fp8"}, "calibration": DATA}, "")
    quantize_checkpoint(str(source), tmp_path / "out", recipe, progress=Lines())
    assert any("carries no KV scales; they are in qdeploy.json" in line for line in lines)
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None
    assert all(record.k_scale > 0 for record in manifest.kv_cache.statistics)
    assert not [name for name in open_folder(tmp_path / "out").names() if "k_scale" in name]


def test_a_layer_never_observed_is_an_error_that_names_it() -> None:
    model = tiny_model("llama")
    with pytest.raises(CalibrationError, match=r"model\.layers\.2: .*observed in 0 of 0"):
        observe_attention(model.model.layers[2], "model.layers.2", model.config, [], lambda _: None)
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("kv_cache", "seqlen", "message"),
    [
        (AUTO | {"layers": {0: {"sink_blocks": 2}}}, 96, r"layers\.0 needs a dtype"),
        (AUTO | {"layers": {9: "int8"}}, 96, r"layer 9 is not in a model of 3"),
        (AUTO, 64, r"needs calibration sequences of 80 tokens .* the longest has 64"),
        (AUTO | {"block_size": 12}, 96, "power of two"),
    ],
)
def test_what_auto_can_not_do_is_one_line_before_the_work(
    kv_cache: dict[str, Any], seqlen: int, message: str, tmp_path: Path
) -> None:
    source = tiny_checkpoint("llama", tmp_path / "model")
    data = {"samples": 4, "seqlen": seqlen}
    with pytest.raises((UsageError, CalibrationError), match=message) as info:
        quantize(source, tmp_path / "out", kv_cache=kv_cache, calibration=data)
    assert "\n" not in str(info.value)
    assert not (tmp_path / "out").exists()


def test_a_layer_that_the_model_has_not_is_refused_before_the_work(tmp_path: Path) -> None:
    """Also of a model that only other engines serve, whose spec nobody reads."""
    base = tiny_checkpoint("llama", tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    config["hidden_act"] = "relu"  # which the runtime doesn't do
    (base / "config.json").write_text(json.dumps(config))
    recipe = {
        "method": "rtn",
        "group_size": 32,
        "kv_cache": {"dtype": "auto", "layers": {99: "int8"}},
    }
    with pytest.raises(UsageError, match="layer 99 is not in a model of 3 layers"):
        quantize_checkpoint(str(base), tmp_path / "out", parse_recipe(recipe, "t"))
