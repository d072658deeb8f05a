"""GPTQ checkpoints whose label contradicts their zero points (formats.md: vllm#38966)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from formats.layer_samples import CHECKPOINTS, Q_PROJ, copy_checkpoint
from qdeploy.formats.checkpoint import Checkpoint, open_checkpoint
from qdeploy.formats.gptq_labels import label_of
from qdeploy.formats.inspect import inspect_artifact
from qdeploy.formats.weight_format import WEIGHT_FORMATS
from qdeploy.quantization.rtn import rtn_quantize
from qdeploy.quantization.scheme import Bits, QuantizedLinear, QuantScheme


def relabel(label: str) -> Any:
    return lambda config: config["quantization_config"].update(checkpoint_format=label)


def relabelled(source: str, label: str, folder: Path) -> Checkpoint:
    return open_checkpoint(copy_checkpoint(source, folder, config=relabel(label)))


@pytest.mark.parametrize(("source", "wrong"), [("gptq_v2", "gptq"), ("gptq", "gptq_v2")])
def test_zero_points_win_over_a_wrong_label_and_it_is_said(
    source: str, wrong: str, tmp_path: Path
) -> None:
    """Their zero points are asymmetric, so no single word gives the version away."""
    right = open_checkpoint(CHECKPOINTS / source)
    found = relabelled(source, wrong, tmp_path / "c")
    assert right.notes == []
    assert found.format == source
    (note,) = found.notes
    assert f"says {wrong}" in note
    assert f"read as {source}" in note
    for module in right.packed:
        assert torch.equal(found.weight(module), right.weight(module))
    inspection = inspect_artifact(tmp_path / "c")
    assert inspection.notes == [note]
    assert f"note: {note}" in inspection.lines()
    assert inspection.to_json()["notes"] == [note]


def test_symmetric_words_are_enough(tmp_path: Path) -> None:
    def zeros(tensors: dict[str, Tensor]) -> None:
        for name in tensors:
            if name.endswith(".qzeros"):
                tensors[name] = torch.full_like(tensors[name], -0x77777778)  # 0x88888888

    def config(data: dict[str, Any]) -> None:
        data["quantization_config"] |= {"sym": True, "checkpoint_format": "gptq"}

    path = copy_checkpoint("gptq", tmp_path / "c", tensors=zeros, config=config)
    checkpoint = open_checkpoint(path)
    assert checkpoint.format == "gptq_v2"
    assert "read as gptq_v2" in checkpoint.notes[0]
    linear = checkpoint.linear(Q_PROJ)
    assert isinstance(linear, QuantizedLinear)
    assert bool((linear.zero_points == 8).all())


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("mean", [0.0, 0.1])
def test_rounded_weights_are_never_taken_for_the_other_version(bits: Bits, mean: float) -> None:
    generator = torch.Generator().manual_seed(bits)
    weight = torch.randn(64, 128, generator=generator) + mean
    scheme = QuantScheme(bits=bits, group_size=32)
    layer = rtn_quantize(weight, scheme)
    layer.zero_points.clamp_(min=1)
    for name in ("gptq", "gptq_v2"):
        packed = WEIGHT_FORMATS.get(name).pack(layer)
        assert label_of([(packed, scheme)]) in (name, None)
        assert bits == 8 or mean > 0 or label_of([(packed, scheme)]) == name


def test_layers_that_disagree_leave_the_label_alone() -> None:
    scheme = QuantScheme(group_size=32)
    layer = rtn_quantize(torch.randn(64, 128, generator=torch.Generator().manual_seed(0)), scheme)
    layer.zero_points.clamp_(min=1)
    both = [(WEIGHT_FORMATS.get(name).pack(layer), scheme) for name in ("gptq", "gptq_v2")]
    assert label_of(both) is None


def test_a_load_says_it(tmp_path: Path) -> None:
    from qdeploy.kv.config import KVCacheConfig
    from qdeploy.progress import Silent
    from qdeploy.runtime.executors import load_executor

    progress = Silent()
    path = copy_checkpoint("gptq_v2", tmp_path / "c", config=relabel("gptq"))
    load_executor(path, backend="reference", kv_config=KVCacheConfig(), progress=progress)
    assert any("read as gptq_v2" in line for line in progress.warnings)
