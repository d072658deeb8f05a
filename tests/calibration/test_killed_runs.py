"""Q11: the command killed with SIGKILL at every kind of moment goes on to the very same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qdeploy.formats.hf import open_folder
from qdeploy.quantization.methods import METHODS
from tiny_models import tiny_checkpoint

SCRIPT = Path(__file__).with_name("killed_runs.py")
POINTS = (
    "before any layer",
    "in the second layer",
    "in the last layer",
    "inputs half written",
    "layer half written",
    "layer written, old inputs still there",
    "all layers done",
    "artifact not yet renamed",
)
OTHERS = sorted(set(METHODS) - {"gptq"})
LAST = "in the last layer"


class Runs:
    """Quantizes one tiny model into folders of `root`; all runs are made by one process."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.model = tiny_checkpoint("llama", root / "model")
        self.text = root / "text.txt"
        self.text.write_text("The quick brown fox jumps over the lazy dog. " * 20)
        self.names: list[str] = []
        self.jobs: list[dict[str, Any]] = []
        self.results: dict[str, dict[str, Any]] = {}

    def add(
        self,
        name: str,
        out: str,
        method: str,
        *extra: object,
        kill: str | None = None,
        spill: bool = False,
    ) -> None:
        args: list[object] = ["quantize", self.model, "-o", self.root / out, "--method", method]
        if METHODS.get(method).needs_calibration:
            args += ["--calib", self.text, "--calib-samples", 6, "--calib-seqlen", 48]
        if method == "signround":
            args += ["--iters", 2]
        if method != "fp8":
            args += ["--group-size", 32]
        args += ["--eval", "none", *extra]
        self.names.append(name)
        self.jobs.append({"args": [str(arg) for arg in args], "kill": kill, "spill": spill})

    def add_killed(self, method: str, point: str) -> None:
        out = f"{method}, {point}"
        self.add(f"killed {out}", out, method, kill=point)
        self.add(f"resumed {out}", out, method)

    def run(self) -> None:
        path = self.root / "jobs.json"
        path.write_text(json.dumps(self.jobs))
        command = [sys.executable, str(SCRIPT), str(self.model), str(path)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        environment |= {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}  # cores are shared
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=550)
        assert done.returncode == 0, done.stderr
        self.results = dict(zip(self.names, json.loads(done.stdout.splitlines()[-1]), strict=True))

    def output(self, name: str) -> str:
        """What a run printed; it must have succeeded."""
        result = self.results[name]
        assert result["code"] == 0, result["output"]
        return " ".join(str(result["output"]).split())

    def digest(self, out: str) -> str:
        return open_folder(self.root / out).weights_sha256()

    def check_killed(self, method: str, point: str) -> None:
        """The run was killed, its successor went on, and nobody can tell the result."""
        out = f"{method}, {point}"
        killed = self.results[f"killed {out}"]
        assert killed["signal"] == 9, killed["output"]
        assert ("resuming: " in self.output(f"resumed {out}")) == (point != POINTS[0])
        assert self.digest(out) == self.digest(method)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    made = Runs(tmp_path_factory.mktemp("runs"))
    for method in ("gptq", *OTHERS):
        made.add(method, method, method)
    for point in POINTS:
        made.add_killed("gptq", point)
    for method in OTHERS:
        made.add_killed(method, "layer half written")
    made.add("8 bits", "8 bits", "gptq", "--bits", 8)
    made.add("4 bits, killed", "other bits", "gptq", "--bits", 4, kill=LAST)
    made.add("other bits", "other bits", "gptq", "--bits", 8)
    made.add("2 threads", "2 threads", "gptq", "--threads", 2)
    made.add("2 threads, killed", "other threads", "gptq", "--threads", 2, kill=LAST)
    made.add("other threads", "other threads", "gptq", "--threads", 1)
    for first in ("memory", "disk"):
        made.add(f"killed on {first}", first, "awq", kill=LAST, spill=first == "disk")
        made.add(f"other than {first}", first, "awq", spill=first == "memory")
    made.run()
    return made


@pytest.mark.parametrize("point", POINTS)
def test_q11_gptq_goes_on_from_any_moment(point: str, runs: Runs) -> None:
    runs.check_killed("gptq", point)


@pytest.mark.parametrize("method", OTHERS)
def test_q11_every_method_goes_on_to_the_same_bits(method: str, runs: Runs) -> None:
    runs.check_killed(method, "layer half written")


def test_q11_another_question_starts_over(runs: Runs) -> None:
    output = runs.output("other bits")
    assert "starting over" in output
    assert "changed recipe" in output
    assert runs.digest("other bits") == runs.digest("8 bits")


def test_q11_a_resumed_run_keeps_its_number_of_threads(runs: Runs) -> None:
    """Sums depend on how torch shares them out: other threads would mix two runs."""
    assert "2 threads, as the run began, not 1" in runs.output("other threads")
    assert runs.digest("other threads") == runs.digest("2 threads")


def test_q11_activations_on_disk_are_resumed_from_disk(runs: Runs) -> None:
    """Killed with activations in memory or on disk, resumed in the other way: the same bits."""
    for first, then in (("memory", "on disk"), ("disk", "in memory")):
        assert f"activations {then}" in runs.output(f"other than {first}")
        assert runs.digest(first) == runs.digest("awq")


def test_q11_nothing_is_left_of_finished_runs(runs: Runs) -> None:
    left = sorted(path.name for path in runs.root.iterdir())
    assert not [name for name in left if "resume" in name or ".tmp" in name]
