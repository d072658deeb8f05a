"""Activations on disk and smaller batches: the same model, in less memory; limits end early."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import qdeploy.pipeline as pipeline
from qdeploy.cli import app
from qdeploy.errors import CapacityError
from qdeploy.formats.checkpoint import open_checkpoint
from qdeploy.formats.hf import open_folder
from qdeploy.pipeline import quantize_checkpoint
from qdeploy.quantization.methods import METHODS
from qdeploy.recipes import CalibrationSection, parse_recipe
from tiny_models import tiny_checkpoint

CALIBRATED = sorted(name for name in METHODS if METHODS.get(name).needs_calibration)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With sliding windows: masks differ between layers."""
    return tiny_checkpoint("gemma3_text", tmp_path_factory.mktemp("gemma") / "model")


def quantize(source: Path, out: Path, method: str, **plan: Any) -> str:
    planned = pipeline.plan_memory
    data = {"method": method, "group_size": 32, "calibration": {"samples": 6, "seqlen": 48}}
    recipe = parse_recipe(data | ({"iters": 4} if method == "signround" else {}), "test")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "plan_memory", lambda *a, **k: replace(planned(*a, **k), **plan))
        quantize_checkpoint(str(source), out, recipe, resume=plan.get("batch_tokens") is None)
    return open_folder(out).weights_sha256()


@pytest.mark.parametrize("method", CALIBRATED)
def test_q03_activations_on_disk_change_no_bit(method: str, gemma: Path, tmp_path: Path) -> None:
    assert quantize(gemma, tmp_path / "memory", method) == quantize(
        gemma, tmp_path / "disk", method, spill=True
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "memory"]


def test_smaller_batches_give_the_same_model_within_rounding(gemma: Path, tmp_path: Path) -> None:
    quantize(gemma, tmp_path / "whole", "gptq")
    quantize(gemma, tmp_path / "small", "gptq", spill=True, batch_tokens=48)
    whole, small = (open_checkpoint(tmp_path / name) for name in ("whole", "small"))
    codes = [
        (c.linear("model.layers.3.mlp.down_proj").codes != 0).float()  # type: ignore[union-attr]
        for c in (whole, small)
    ]
    assert (codes[0] != codes[1]).float().mean() < 0.02
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small", "whole"]


def test_q04_a_limit_that_cannot_be_kept_ends_before_any_work(gemma: Path, tmp_path: Path) -> None:
    recipe = parse_recipe({"method": "awq", "group_size": 32}, "test")
    with pytest.raises(CapacityError, match="--max-memory 1MiB is too little"):
        quantize_checkpoint(str(gemma), tmp_path / "out", recipe, max_memory=1 << 20)
    assert list(tmp_path.iterdir()) == []
    own = recipe.model_copy(update={"calibration": CalibrationSection(source="self")})
    with pytest.raises(CapacityError, match=r"--calib self loads the whole model.*give text"):
        quantize_checkpoint(str(gemma), tmp_path / "out", own, max_memory=1 << 20)


def test_q04_the_peak_is_said_up_front_and_reported(gemma: Path, tmp_path: Path) -> None:
    args = ("quantize", gemma, "-o", tmp_path / "out", "--method", "rtn", "--group-size", 32)
    args += ("--eval", "none", "--json", "--max-memory")
    result = CliRunner().invoke(app, [*map(str, args), "1TiB"])
    assert result.exit_code == 0, result.output
    assert "memory: about " in result.stderr
    assert json.loads(result.stdout)["peak_rss_bytes"] > 0
    result = CliRunner().invoke(app, [*map(str, args), "2MiB", "--overwrite"])
    assert result.exit_code == 2
    assert "error: --max-memory 2MiB is too little" in " ".join(result.stderr.split())
    measured = [*map(str, args), "2MiB", "--overwrite", "--eval", "quick"]
    result = CliRunner().invoke(app, measured)
    assert result.exit_code == 2
    assert "measuring the artifact loads the whole model" in " ".join(result.stderr.split())
    result = CliRunner().invoke(app, [*map(str, args), "much"])
    assert (result.exit_code, "--max-memory 'much' is not a size" in result.output) == (2, True)
