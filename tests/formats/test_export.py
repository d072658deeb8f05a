"""`export`: the same codes and scales in another format, or a refusal that names one that can."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cpu.quantized_models import WeightKind, quantized_checkpoint
from formats.layer_samples import CHECKPOINTS, Q_PROJ, copy_checkpoint
from qdeploy.errors import UsageError
from qdeploy.formats.checkpoint import Checkpoint, open_checkpoint
from qdeploy.formats.convert import export_checkpoint
from qdeploy.formats.hf import open_folder
from qdeploy.formats.manifest import AccuracyRecord, read_manifest, write_manifest
from qdeploy.formats.weight_format import WEIGHT_FORMATS
from qdeploy.progress import Silent
from qdeploy.quantization.scheme import QuantizedLinear

INT4 = ("awq", "gptq_v2", "compressed-tensors")


def layers(folder: Path) -> dict[str, QuantizedLinear]:
    checkpoint = open_checkpoint(folder)
    found = {module: checkpoint.linear(module) for module in checkpoint.packed}
    return {name: q for name, q in found.items() if isinstance(q, QuantizedLinear)}


def assert_same_codes(left: Path, right: Path) -> None:
    ours, theirs = layers(left), layers(right)
    assert ours.keys() == theirs.keys()
    for name, q in ours.items():
        for part in ("codes", "zero_points"):
            assert torch.equal(getattr(q, part), getattr(theirs[name], part)), (name, part)
        assert torch.equal(q.scales.float(), theirs[name].scales.float()), name
        assert torch.equal(q.dequantize(), theirs[name].dequantize())


@pytest.mark.parametrize("source", ["awq", "gptq", "gptq_v2", "ct_asym", "ct_sym"])
@pytest.mark.parametrize("target", INT4)
def test_int4_formats_convert_bit_for_bit(source: str, target: str, tmp_path: Path) -> None:
    if source.startswith("ct") and target == "awq":  # its scales are bfloat16
        source = "gptq"
    result = export_checkpoint(CHECKPOINTS / source, tmp_path / "out", target)
    assert result.lossless
    assert (result.format, result.layers) == (target, 14)
    assert open_checkpoint(tmp_path / "out", verify_checksums=True).format == target
    assert_same_codes(CHECKPOINTS / source, tmp_path / "out")
    dense = open_folder(CHECKPOINTS / source)
    made = open_folder(tmp_path / "out")
    for name in ("model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(made.tensor(name), dense.tensor(name))


def test_there_and_back_again_gives_the_same_weights_file(tmp_path: Path) -> None:
    folder = CHECKPOINTS / "awq"
    for step, format in enumerate(("gptq_v2", "compressed-tensors", "awq")):
        export_checkpoint(folder, tmp_path / str(step), format)
        folder = tmp_path / str(step)
    assert open_folder(folder).weights_sha256() == open_folder(CHECKPOINTS / "awq").weights_sha256()


def test_symmetric_weights_are_found_in_formats_that_do_not_say_so(tmp_path: Path) -> None:
    def zeros(tensors: dict[str, Tensor]) -> None:
        for name in tensors:
            if name.endswith(".qzeros"):
                tensors[name] = torch.full_like(tensors[name], -0x77777778)  # all 8

    source = copy_checkpoint("awq", tmp_path / "sym", tensors=zeros)
    for format in ("gptq", "compressed-tensors"):
        result = export_checkpoint(source, tmp_path / format, format)
        assert result.scheme == "W4A16"
        assert_same_codes(source, tmp_path / format)
    names = open_folder(tmp_path / "compressed-tensors").names()
    assert not any(name.endswith("weight_zero_point") for name in names)


def zero_first_zero_point(tensors: dict[str, Tensor]) -> None:
    tensors[f"{Q_PROJ}.qzeros"][0, 0] &= ~0xF


def tiny_scales(tensors: dict[str, Tensor]) -> None:
    """Exact in bfloat16 only."""
    for name in tensors:
        if name.endswith(".weight_scale"):
            tensors[name] = tensors[name].bfloat16() * 2**-30


REFUSED: dict[str, tuple[str, str, Any, str]] = {
    "a zero point of 0": ("gptq_v2", "gptq", zero_first_zero_point, "zero point of 0.*gptq_v2"),
    "scales beyond float16": ("ct_asym", "awq", tiny_scales, "float16 scales.*gptq_v2"),
    "activation order": ("gptq_act", "awq", None, "activation order.*gptq"),
    "activation order, CT": ("gptq_act", "compressed-tensors", None, "activation order.*gptq_v2"),
    "floats": ("ct_fp8", "gptq_v2", None, "FP8.*compressed-tensors"),
    "8-bit activations": ("ct_int8", "gptq", None, "W8A8.*compressed-tensors"),
    "parts of blocks": ("fp8block", "compressed-tensors", None, "multiples of 128"),
    "rows of floats": ("ct_fp8", "fp8", None, "FP8_BLOCK.*compressed-tensors"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_q19_what_a_format_cannot_hold_is_named(case: str, tmp_path: Path) -> None:
    source, target, edit, expected = REFUSED[case]
    folder = copy_checkpoint(source, tmp_path / "in", tensors=edit)
    with pytest.raises(UsageError, match=expected) as info:
        export_checkpoint(folder, tmp_path / "out", target)
    assert "\n" not in str(info.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def test_v1_holds_asymmetric_weights_without_a_zero_point_of_0(tmp_path: Path) -> None:
    def at_least_one(tensors: dict[str, Tensor]) -> None:
        fmt = WEIGHT_FORMATS.get("gptq_v2")
        source = open_checkpoint(CHECKPOINTS / "gptq_v2")
        for module in source.packed:
            q = source.linear(module)
            assert isinstance(q, QuantizedLinear)
            q.zero_points.clamp_(min=1)
            tensors.update({f"{module}.{n}": t for n, t in fmt.pack(q).items()})

    folder = copy_checkpoint("gptq_v2", tmp_path / "in", tensors=at_least_one)
    export_checkpoint(folder, tmp_path / "out", "gptq")
    assert_same_codes(folder, tmp_path / "out")


def test_fp8_blocks_convert_both_ways(tmp_path: Path) -> None:
    kind = WeightKind(format="fp8", bits=8, symmetric=True, block_rows=128, group=128)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64}
    source = quantized_checkpoint("llama", tmp_path, kind, **sizes)
    export_checkpoint(source, tmp_path / "ct", "compressed-tensors")
    export_checkpoint(tmp_path / "ct", tmp_path / "fp8", "fp8")
    assert_same_codes(source, tmp_path / "ct")
    assert_same_codes(source, tmp_path / "fp8")


def test_dense_is_named_lossy_and_drops_the_records(tmp_path: Path) -> None:
    source = artifact(tmp_path)
    result = export_checkpoint(source, tmp_path / "dense", "dense")
    assert not result.lossless
    made, packed = open_checkpoint(tmp_path / "dense"), open_checkpoint(source)
    assert made.format is None
    dtype = open_folder(source).dtype("model.embed_tokens.weight")
    for module in packed.packed:
        assert torch.equal(made.tensor(f"{module}.weight"), packed.weight(module).to(dtype))
    manifest = read_manifest(tmp_path / "dense")
    assert manifest is not None
    assert (manifest.accuracy, manifest.layers) == ([], [])


def artifact(folder: Path) -> Path:
    """The awq fixture as an artifact of ours, with an accuracy record."""
    export_checkpoint(CHECKPOINTS / "awq", folder / "artifact", "awq")
    manifest = read_manifest(folder / "artifact")
    assert manifest is not None
    record = AccuracyRecord(
        backend="reference",
        reference="base",
        text_sha256="0" * 64,
        num_tokens=9,
        ctx_len=8,
        metrics={"kl_mean": 0.5},
        passed=True,
    )
    write_manifest(folder / "artifact", manifest.with_record(record))
    return folder / "artifact"


def test_the_record_stays_valid_and_everything_else_is_carried(tmp_path: Path) -> None:
    source = artifact(tmp_path)
    (source / "tokenizer.json").write_text("{}")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    result = export_checkpoint(source, tmp_path / "out", "gptq_v2", name="org/model")
    before, after = read_manifest(source), read_manifest(tmp_path / "out")
    assert before is not None
    assert after is not None
    assert result.accuracy_records == 1
    assert after.accuracy == before.accuracy
    assert after.base_model == before.base_model
    assert after.recipe["format"] == "gptq_v2"
    assert after.exported is not None
    assert (after.exported.source, after.exported.format) == ("org/model", "awq")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Converted from `org/model` (awq" in card
    assert "0.5" in card
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
        assert name in after.files


def test_a09_a10_shards_of_an_export_hold_every_tensor_once(tmp_path: Path) -> None:
    whole, sharded = tmp_path / "whole", tmp_path / "sharded"
    export_checkpoint(CHECKPOINTS / "awq", whole, "gptq_v2")
    export_checkpoint(CHECKPOINTS / "awq", sharded, "gptq_v2", max_shard_size=40_000)
    weight_map = json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(weight_map.values())) > 2
    assert weight_map.keys() == open_folder(whole).names()
    assert open_folder(sharded).weights_sha256() == open_folder(whole).weights_sha256()


def test_q24_an_unquantized_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not quantized; use qdeploy quantize"):
        export_checkpoint(CHECKPOINTS / "dense", tmp_path / "out", "awq")
    with pytest.raises(UsageError, match=r"unknown weight format 'gguf'.*dense"):
        export_checkpoint(CHECKPOINTS / "awq", tmp_path / "out", "gguf")


def test_the_models_own_code_comes_along(tmp_path: Path) -> None:
    """What config.json names must be there."""
    source = copy_checkpoint("awq", tmp_path / "in")
    data = json.loads((source / "config.json").read_text())
    data["auto_map"] = {"AutoConfig": "configuration_x.X"}
    (source / "config.json").write_text(json.dumps(data))
    (source / "configuration_x.py").write_text("X = 1\n")
    export_checkpoint(source, tmp_path / "out", "gptq_v2")
    assert (tmp_path / "out" / "configuration_x.py").read_text() == "X = 1\n"


def test_an_output_that_exists_is_refused_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    monkeypatch.setattr(Checkpoint, "linear", lambda *_: pytest.fail("a layer was read"))
    with pytest.raises(UsageError, match="overwrite"):
        export_checkpoint(CHECKPOINTS / "awq", tmp_path / "out", "gptq_v2")


def test_a11_legacy_configs_and_an_untied_head_survive(tmp_path: Path) -> None:
    """AutoGPTQ's files: quantize_config.json alone, and a head of its own in a tied model."""
    source = copy_checkpoint("gptq", tmp_path / "in")
    data = json.loads((source / "config.json").read_text())
    (source / "quantize_config.json").write_text(json.dumps(data.pop("quantization_config")))
    (source / "config.json").write_text(json.dumps(data | {"tie_word_embeddings": True}))
    export_checkpoint(source, tmp_path / "out", "gptq_v2")
    assert_same_codes(source, tmp_path / "out")
    made, given = open_folder(tmp_path / "out"), open_folder(source)
    assert torch.equal(made.tensor("lm_head.weight"), given.tensor("lm_head.weight"))
    assert not (tmp_path / "out" / "quantize_config.json").exists()


def test_kv_scales_go_where_they_are_read_and_are_named_where_not(tmp_path: Path) -> None:
    def scales(tensors: dict[str, Tensor]) -> None:
        for layer in range(2):
            for name in "kv":
                tensors[f"model.layers.{layer}.self_attn.{name}_scale"] = torch.tensor([0.25])

    source = copy_checkpoint("gptq", tmp_path / "in", tensors=scales)
    carried, dropped = tmp_path / "ct", tmp_path / "v2"
    export_checkpoint(source, carried, "compressed-tensors")
    name = "model.layers.1.self_attn.v_scale"
    assert open_folder(carried).tensor(name).item() == 0.25
    config = json.loads((carried / "config.json").read_text())["quantization_config"]
    assert config["kv_cache_scheme"]["num_bits"] == 8
    progress = Silent()
    export_checkpoint(source, dropped, "gptq_v2", progress=progress)
    assert name not in open_folder(dropped).names()
    assert any("4 scales of the KV cache are left out" in line for line in progress.warnings)
