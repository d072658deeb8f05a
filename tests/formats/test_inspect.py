"""Inspecting artifacts and foreign checkpoints: every fault is a finding."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from formats.layer_samples import CHECKPOINTS, Q_PROJ, copy_checkpoint
from qdeploy.errors import FormatError
from qdeploy.formats.artifact import ArtifactWriter
from qdeploy.formats.checkpoint import open_checkpoint
from qdeploy.formats.hf import open_folder
from qdeploy.formats.inspect import inspect_artifact
from qdeploy.formats.manifest import (
    BaseModelRecord,
    KVCacheRecord,
    LayerRecord,
    Manifest,
    read_manifest,
    write_manifest,
)


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    """The awq fixture, written again by us."""
    source = open_checkpoint(CHECKPOINTS / "awq")
    base = open_folder(CHECKPOINTS / "awq")
    manifest = Manifest(
        base_model=BaseModelRecord(name="org/base"),
        recipe={"method": "awq"},
        layers=[LayerRecord(name=name, scheme="W4A16_ASYM") for name in source.packed],
    )
    with ArtifactWriter(tmp_path / "artifact", base, overwrite=False) as writer:
        for name in base.names():
            writer.add(name, base.tensor(name))
        return writer.finish(manifest, source.config["quantization_config"])


def test_whole_artifact_has_no_findings(artifact: Path) -> None:
    inspection = inspect_artifact(artifact, verify=True)
    assert inspection.findings == []
    assert (inspection.format, inspection.scheme) == ("awq", "W4A16_ASYM")
    assert inspection.size_bytes == sum(p.stat().st_size for p in artifact.iterdir())
    assert any("gptqmodel" in reader for reader in inspection.readers)
    data = json.loads(json.dumps(inspection.to_json()))
    assert data["manifest"]["base_model"]["name"] == "org/base"
    assert "org/base" in "\n".join(inspection.lines())


def test_bits_per_weight_counts_stored_bytes() -> None:
    # 4-bit codes, and for each group of 64 a float16 scale and a 4-bit zero point.
    awq = inspect_artifact(CHECKPOINTS / "awq").bits_per_weight
    assert awq == pytest.approx(4 + (16 + 4) / 64)
    # GPTQ adds an int32 group index for each input feature of each layer.
    checkpoint = open_checkpoint(CHECKPOINTS / "gptq")
    inputs = sum(shape[1] for shape in checkpoint.packed.values())
    weights = sum(shape[0] * shape[1] for shape in checkpoint.packed.values())
    gptq = inspect_artifact(CHECKPOINTS / "gptq").bits_per_weight
    assert gptq == pytest.approx(4 + (16 + 4) / 64 + 32 * inputs / weights)
    assert inspect_artifact(CHECKPOINTS / "dense").bits_per_weight == 16


def test_foreign_checkpoints_have_no_manifest() -> None:
    for name in ("gptq", "gptq_act", "dense"):
        inspection = inspect_artifact(CHECKPOINTS / name)
        assert inspection.manifest is None
        assert inspection.findings == []


def test_reader_is_not_claimed_for_bits_that_were_not_tested(tmp_path: Path) -> None:
    from qdeploy.formats.inspect import readers_of
    from qdeploy.formats.module_schemes import ModuleSchemes
    from qdeploy.quantization.scheme import QuantScheme

    checkpoint = open_checkpoint(CHECKPOINTS / "gptq")
    checkpoint._rules = ModuleSchemes(default=QuantScheme(bits=3, group_size=16))
    assert readers_of(checkpoint) == []


def test_changed_byte_is_found_by_verify_only(artifact: Path) -> None:
    path = artifact / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert inspect_artifact(artifact).findings == []
    (finding,) = inspect_artifact(artifact, verify=True).findings
    assert "model.safetensors has sha256" in finding
    with pytest.raises(FormatError, match=r"model\.safetensors has sha256"):
        open_checkpoint(artifact, verify_checksums=True)


@pytest.mark.parametrize("keep", [0, 7, 100, 5000, -1])
def test_truncated_weights_are_a_finding(keep: int, artifact: Path) -> None:
    path = artifact / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    (finding,) = inspect_artifact(artifact).findings
    assert "model.safetensors" in finding


def test_missing_file_of_the_manifest_is_a_finding(artifact: Path) -> None:
    manifest = read_manifest(artifact)
    assert manifest is not None
    files = manifest.files | {"tokenizer.json": "00"}
    write_manifest(artifact, manifest.model_copy(update={"files": files}))
    (finding,) = inspect_artifact(artifact).findings
    assert "tokenizer.json" in finding


def test_a18_layers_of_the_manifest_must_have_weights(artifact: Path) -> None:
    manifest = read_manifest(artifact)
    assert manifest is not None
    layers = [*manifest.layers, LayerRecord(name="model.layers.7.mlp.up_proj", scheme="W4A16")]
    write_manifest(artifact, manifest.model_copy(update={"layers": layers}))
    (finding,) = inspect_artifact(artifact).findings
    assert "model.layers.7.mlp.up_proj" in finding


def test_unknown_kv_policy_is_a_finding(artifact: Path) -> None:
    manifest = read_manifest(artifact)
    assert manifest is not None
    changed = manifest.model_copy(update={"kv_cache": KVCacheRecord(dtype="int3")})
    write_manifest(artifact, changed)
    inspection = inspect_artifact(artifact)
    assert any("int3" in finding for finding in inspection.findings)
    assert inspection.lines()


def test_every_broken_layer_is_named(tmp_path: Path) -> None:
    modules = (Q_PROJ, "model.layers.1.mlp.down_proj")

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        for module in modules:
            tensors[f"{module}.scales"][0, 0] = float("nan")

    findings = inspect_artifact(copy_checkpoint("awq", tmp_path / "c", tensors=spoil)).findings
    assert [any(m in finding for finding in findings) for m in modules] == [True, True]
    assert len(findings) == 2


def test_verify_without_a_manifest_is_a_finding() -> None:
    (finding,) = inspect_artifact(CHECKPOINTS / "awq", verify=True).findings
    assert "no qdeploy.json" in finding
    with pytest.raises(FormatError, match="no checksums"):
        open_checkpoint(CHECKPOINTS / "awq", verify_checksums=True)


def test_folder_that_is_no_model_is_a_finding(tmp_path: Path) -> None:
    (finding,) = inspect_artifact(tmp_path).findings
    assert str(tmp_path) in finding
