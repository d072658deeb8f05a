"""`--method signround` end to end: artifact, options, resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from qdeploy.cli import app
from qdeploy.errors import UsageError
from qdeploy.formats.checkpoint import open_checkpoint
from qdeploy.formats.hf import open_folder
from qdeploy.formats.manifest import read_manifest
from qdeploy.pipeline import quantize_checkpoint
from qdeploy.recipes import parse_recipe
from tiny_models import tiny_checkpoint

TINY = {
    "method": "signround",
    "group_size": 32,
    "iters": 6,
    "calibration": {"samples": 6, "seqlen": 48},
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama") / "model")


def qdeploy(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def quantize(source: Path, out: Path, **recipe: Any) -> str:
    """Digest of the artifact's weights."""
    quantize_checkpoint(str(source), out, parse_recipe(TINY | recipe, "test"))
    return open_folder(out).weights_sha256()


def test_command_line_to_a_measured_artifact(llama: Path, tmp_path: Path) -> None:
    calib = tmp_path / "text.txt"
    calib.write_text("The quick brown fox jumps over the lazy dog. " * 60)
    losses = {}
    for method, extra in (("awq", ()), ("signround", ("--iters", 30, "--lr", 0.03))):
        out = tmp_path / method
        command = ("quantize", llama, "-o", out, "--method", method, *extra, "--calib", calib)
        result = qdeploy(*command, "--group-size", 32, "--gate", "kl<100", "--json")
        assert result.exit_code == 0, result.output
        report = json.loads(result.stdout)
        losses[method] = report["accuracy"][0]["metrics"]["kl_mean"]
        assert report["format"] == {"awq": "awq", "signround": "compressed-tensors"}[method]
    manifest = read_manifest(out)
    assert manifest is not None
    assert (manifest.recipe["iters"], manifest.recipe["lr"]) == (30, 0.03)
    assert len(manifest.layers) == 21
    assert all(layer.loss is not None for layer in manifest.layers)
    assert losses["signround"] < losses["awq"]


def test_default_options_are_recorded(llama: Path, tmp_path: Path) -> None:
    quantize(llama, tmp_path / "out", iters=4)
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None
    assert (manifest.recipe["iters"], manifest.recipe["lr"]) == (4, 0.25)


@pytest.mark.parametrize("format", ["awq", "gptq_v2", "compressed-tensors"])
def test_every_format_of_integers_holds_it(format: str, llama: Path, tmp_path: Path) -> None:
    quantize(llama, tmp_path / "out", format=format, iters=2)
    checkpoint = open_checkpoint(tmp_path / "out")
    assert checkpoint.format == format
    assert checkpoint.weight("model.layers.2.mlp.down_proj").isfinite().all()


@pytest.mark.parametrize("change", [{"iters": 7}, {"lr": 0.5}])
def test_q18_an_option_changes_the_weights(
    change: dict[str, Any], llama: Path, tmp_path: Path
) -> None:
    assert quantize(llama, tmp_path / "a") != quantize(llama, tmp_path / "b", **change)


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ({"method": "awq", "iters": 5}, "iters needs method signround, not awq"),
        ({"method": "gptq", "lr": 0.1}, "lr needs method signround, not gptq"),
        ({"method": "signround", "iters": 0}, "iters"),
        ({"method": "signround", "lr": 0}, "lr"),
    ],
)
def test_q19_options_that_would_have_no_effect(recipe: dict[str, Any], expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        parse_recipe(recipe, "test")


def test_another_method_forgets_the_recipes_training_keys(llama: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "trained.yaml"
    recipe.write_text(f"model: {llama}\nmethod: signround\niters: 7\ngroup_size: 32\n")
    out = tmp_path / "out"
    result = qdeploy("quantize", "--recipe", recipe, "-o", out, "--method", "rtn", "--eval", "none")
    assert result.exit_code == 0, result.output
    refused = qdeploy("quantize", llama, "-o", out, "--method", "rtn", "--iters", 3)
    assert refused.exit_code == 2
    assert "iters needs method signround" in refused.output
