"""benchmarks/engine_overhead.py end to end, a few steps of each case."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "engine_overhead.py"


@pytest.mark.model
def test_engine_overhead_writes_its_figures(smollm2_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    subprocess.run(
        [sys.executable, str(SCRIPT), "--steps", "30", "--json", str(file)],
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    rows = json.loads(file.read_text(encoding="utf-8"))
    assert len(rows) == 10
    assert {tuple(row) for row in rows} == {
        ("name", "value", "unit", "ratio", "against", "n", "command")
    }
    assert all(row["value"] > 0 for row in rows)
    by_name = {row["name"]: row["value"] for row in rows}
    # The targets are for a quiet machine; ten times as much is another algorithm.
    assert by_name["step greedy batch 1"] < 1.2
    assert by_name["step greedy batch 32"] < 8
