"""Checkpoints whose layers have different schemes: rules, configs, reading, refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from formats.layer_samples import Q_PROJ, copy_checkpoint, random_fp8_layer, random_layer, same
from qdeploy.errors import FormatError, UsageError
from qdeploy.formats.artifact import ArtifactWriter
from qdeploy.formats.checkpoint import open_checkpoint
from qdeploy.formats.hf import open_folder
from qdeploy.formats.inspect import inspect_artifact
from qdeploy.formats.manifest import BaseModelRecord, Manifest
from qdeploy.formats.module_schemes import ModuleSchemes, schemes_name
from qdeploy.formats.weight_format import WEIGHT_FORMATS, default_format
from qdeploy.quantization.scheme import QuantizedLinear, QuantScheme, fp8_scheme

CT = WEIGHT_FORMATS.get("compressed-tensors")
GPTQ = WEIGHT_FORMATS.get("gptq_v2")
W4, W8 = QuantScheme(group_size=32), QuantScheme(bits=8, group_size=32, symmetric=True)
FP8 = fp8_scheme("FP8_DYNAMIC")
W8A8 = QuantScheme(bits=8, group_size=-1, symmetric=True, activations="dynamic")
DOWN = "model.layers.0.mlp.down_proj"


def test_names_come_before_patterns_and_patterns_before_the_rest() -> None:
    patterns = ((re.compile(r".*\.q_proj"), W8), (re.compile(r"model\.layers\.0\."), FP8))
    schemes = ModuleSchemes(default=W4, names={DOWN: W8A8}, patterns=patterns)
    found = [schemes.of(n) for n in (DOWN, Q_PROJ, "model.layers.0.mlp.up_proj", "model.x")]
    assert found == [W8A8, W8, FP8, W4]
    assert set(schemes.all) == {W4, W8, FP8, W8A8}
    assert ModuleSchemes().of(DOWN) is None


def test_a_config_gives_every_layer_its_scheme_back() -> None:
    schemes = {"a": W4, "b": W8, "c": W4, "d": FP8, "e": W8A8, "f": W4}
    config = json.loads(json.dumps(CT.quantization_config(schemes, ["lm_head"])))
    assert config["format"] == "mixed-precision"
    formats = [group["format"] for group in config["config_groups"].values()]
    assert formats == ["pack-quantized", "pack-quantized", "float-quantized", "int-quantized"]
    parsed = CT.parse_config(config)
    assert {name: parsed.of(name) for name in schemes} == schemes


def test_groups_stored_alike_are_no_mixed_precision() -> None:
    assert CT.quantization_config({"a": W4, "b": W8}, [])["format"] == "pack-quantized"


@pytest.mark.parametrize("name", ["awq", "gptq", "gptq_v2", "fp8"])
def test_q19_other_formats_name_the_one_that_mixes(name: str) -> None:
    with pytest.raises(UsageError, match=r"W4A16_ASYM \+ W8A16.*compressed-tensors"):
        WEIGHT_FORMATS.get(name).quantization_config({"a": W4, "b": W8, "c": W4}, [])
    assert default_format("awq", W4, W8) == "compressed-tensors"


def mixed_artifact(base: Path, out: Path) -> dict[str, QuantizedLinear]:
    """The dense fixture with a scheme for each kind of projection; returns the layers."""
    folder = open_folder(base)
    schemes = {"q_proj": W8, "down_proj": FP8, "up_proj": W8A8}
    layers: dict[str, QuantizedLinear] = {}
    with ArtifactWriter(out, folder, overwrite=False) as writer:
        for name in sorted(folder.names()):
            module = name.removesuffix(".weight")
            kind = module.rpartition(".")[2]
            if not kind.endswith("_proj") or kind == "o_proj":
                writer.add(name, folder.tensor(name))
                continue
            shape = folder.shape(name)
            scheme = schemes.get(kind, W4)
            make = random_fp8_layer if scheme is FP8 else random_layer
            options = () if scheme is FP8 else (scheme,)
            layers[module] = make(*options, *shape, seed=len(layers))  # type: ignore[operator]
            writer.add_linear(module, layers[module], CT)
        by_module = {name: q.scheme for name, q in layers.items()}
        dense = [n.removesuffix(".weight") for n in folder.names() if "o_proj" in n]
        config = CT.quantization_config(by_module, [*dense, "lm_head"])
        writer.finish(Manifest(base_model=BaseModelRecord(name="x"), recipe={}), config)
    return layers


def test_a03_mixed_layers_read_back_bit_for_bit(tmp_path: Path) -> None:
    base = copy_checkpoint("dense", tmp_path / "base")
    layers = mixed_artifact(base, tmp_path / "out")
    checkpoint = open_checkpoint(tmp_path / "out")
    assert checkpoint.packed.keys() == layers.keys()
    for name, layer in layers.items():
        found = checkpoint.linear(name)
        assert isinstance(found, QuantizedLinear)
        assert found.scheme == layer.scheme
        assert same(found, layer)
    assert isinstance(checkpoint.linear("model.layers.0.self_attn.o_proj"), torch.Tensor)
    inspection = inspect_artifact(tmp_path / "out")
    assert inspection.findings == []
    name = inspection.scheme or ""
    assert set(name.split(" + ")) == {"W4A16_ASYM", "W8A16", "W8A8", "FP8_DYNAMIC"}
    assert name == schemes_name(q.scheme for q in layers.values())
    card = (tmp_path / "out" / "README.md").read_text()
    assert "some layers 8-bit floats" in card


def edit(config: dict[str, Any], key: str, value: Any) -> None:
    (group, *_) = config["quantization_config"]["config_groups"].values()
    group[key] = value


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("targets", [r"re:.*\.k_proj$"], "has it among its targets"),
        ("targets", ["re:("], r"targets '\('"),
        ("targets", "Linear", "targets='Linear'"),
    ],
)
def test_targets_that_miss_a_packed_layer_are_named(
    key: str, value: Any, expected: str, tmp_path: Path
) -> None:
    path = copy_checkpoint("ct_sym", tmp_path / "c", config=lambda c: edit(c, key, value))
    with pytest.raises(FormatError, match=expected) as info:
        open_checkpoint(path)
    assert "\n" not in str(info.value)


def test_gptqmodel_rules_by_module_are_honoured(tmp_path: Path) -> None:
    rules = {r"+:.*\.q_proj": {"bits": 8, "group_size": 32}, r".*\.k_proj": {"bits": 3}, "-:x": {}}
    config = GPTQ.quantization_config({"m": W8}, []) | {"dynamic": rules}
    parsed = GPTQ.parse_config(config | {"bits": 4, "group_size": 64})
    named = {n: parsed.of(f"model.layers.1.self_attn.{n}") for n in ("q_proj", "k_proj", "v_proj")}
    assert {n: (s.bits, s.group_size) for n, s in named.items() if s is not None} == {
        "q_proj": (8, 32),
        "k_proj": (3, 64),
        "v_proj": (4, 64),
    }
    layer = random_layer(QuantScheme(bits=8, group_size=32, symmetric=True), 128, 128)

    def tensors(stored: dict[str, torch.Tensor]) -> None:
        stored.update({f"{Q_PROJ}.{name}": t for name, t in GPTQ.pack(layer).items()})

    def rule(data: dict[str, Any]) -> None:
        override = {"bits": 8, "group_size": 32, "sym": True}
        data["quantization_config"]["dynamic"] = {f"+:{re.escape(Q_PROJ)}": override}

    path = copy_checkpoint("gptq_v2", tmp_path / "c", tensors=tensors, config=rule)
    found = open_checkpoint(path).linear(Q_PROJ)
    assert isinstance(found, QuantizedLinear)
    assert same(found, layer)
