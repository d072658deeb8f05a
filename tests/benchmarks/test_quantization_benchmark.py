"""benchmarks/quantization.py end to end on a tiny model, and the tables made of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tiny_models import tiny_checkpoint

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCHEME = "W4 g64 asym"


def run(script: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / script), *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("benchmark")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    model = tiny_checkpoint("llama", folder / "tiny", **sizes)
    done = run(
        "quantization.py",
        *("--model", str(model), "--only", rf"{SCHEME} \| (rtn|awq)$|KV"),
        *("--samples", "4", "--seqlen", "32", "--windows", "1", "--ctx-len", "160"),
        *("--json", str(folder / "out.json")),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "out.json"


def test_methods_are_compared_with_rounding_at_the_same_scheme(out: Path) -> None:
    rows: dict[str, dict[str, Any]] = {row["name"]: row for row in json.loads(out.read_text())}
    rtn = rows[f"tiny | {SCHEME} | rtn | kl_mean"]
    awq = rows[f"tiny | {SCHEME} | awq | kl_mean"]
    assert rtn["n"] == awq["n"] == 160
    assert (rtn["ratio"], awq["against"]) == (None, "rtn")
    assert awq["ratio"] == awq["value"] / rtn["value"] > 0
    assert rows[f"tiny | {SCHEME} | awq | quantize"]["value"] > 0
    assert rows[f"tiny | {SCHEME} | awq | peak memory"]["value"] > 50
    exact, coarse = (
        rows[f"tiny | KV block 64, sink {s}, residual 0 | int4 | kl_mean"] for s in "10"
    )
    assert 0 < exact["value"] < coarse["value"]


def test_tables_have_a_line_for_each_case(out: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- figures: begin -->\nold\n<!-- figures: end -->\nafter\n")
    done = run("quantization_table.py", str(out), str(page))
    assert done.returncode == 0, done.stderr
    lines = page.read_text().splitlines()
    assert "old" not in lines
    assert (lines[0], lines[-1]) == ("before", "after")
    assert sum(line.startswith(f"| tiny, {SCHEME}, ") for line in lines) == 2
    assert sum("**" in line for line in lines) == 1
    assert any(line.startswith("| tiny, int8, block 64, sink 1, residual 0 | ") for line in lines)
