"""Export on the real model: the same logits bit for bit, in shards, through the CLI."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from qdeploy.cli import app
from qdeploy.kv.config import KVCacheConfig
from qdeploy.runtime.executors import load_executor
from tables import run_chunks

pytestmark = [pytest.mark.model, pytest.mark.slow]
TOKENS = torch.randint(0, 40000, (32,), generator=torch.Generator().manual_seed(2)).tolist()


def qdeploy(*arguments: object) -> None:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output


def logits(folder: Path) -> torch.Tensor:
    executor = load_executor(folder, kv_config=KVCacheConfig())
    return run_chunks(executor, TOKENS, [len(TOKENS)])


def test_a09_a_sharded_export_has_the_logits_of_its_source(
    smollm2_folder: Path, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    qdeploy("quantize", smollm2_folder, "-o", source, "--method", "rtn", "--eval", "none")
    expected = logits(source)
    folder = source
    for format in ("gptq_v2", "awq", "compressed-tensors"):
        out = tmp_path / format
        qdeploy("export", folder, "-o", out, "--format", format, "--max-shard-size", "40MB")
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert len(set(index["weight_map"].values())) >= 3
        assert torch.equal(logits(out), expected)
        folder = out
