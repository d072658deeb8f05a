"""benchmarks/quantization.py end to end on a tiny model, and the tables made of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmark_scripts import BENCHMARKS, run
from tiny_models import tiny_checkpoint

SCHEME = "W4 g64 asym"


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


def test_the_page_shows_the_committed_figures(tmp_path: Path) -> None:
    committed = BENCHMARKS.parent / "docs" / "quantization-figures.md"
    page = tmp_path / "page.md"
    page.write_text(committed.read_text(encoding="utf-8"), encoding="utf-8")
    results = BENCHMARKS / "results" / "quantization.json"
    assert run("quantization_table.py", str(results), str(page)).returncode == 0
    assert page.read_text(encoding="utf-8") == committed.read_text(encoding="utf-8")
