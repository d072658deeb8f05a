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


class Runner:
    """Quantizes one tiny model into folders of `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.model = tiny_checkpoint("llama", root / "model")
        self.text = root / "text.txt"
        self.text.write_text("The quick brown fox jumps over the lazy dog. " * 20)

    def job(
        self,
        out: str,
        method: str,
        *extra: object,
        kill: str | None = None,
        spill: bool = False,
    ) -> dict[str, Any]:
        args: list[object] = ["quantize", self.model, "-o", self.root / out, "--method", method]
        if METHODS.get(method).needs_calibration:
            args += ["--calib", self.text, "--calib-samples", 6, "--calib-seqlen", 48]
        if method == "signround":
            args += ["--iters", 4]
        if method != "fp8":
            args += ["--group-size", 32]
        args += ["--eval", "none", *extra]
        return {"args": [str(arg) for arg in args], "kill": kill, "spill": spill}

    def run(self, *jobs: dict[str, Any]) -> list[dict[str, Any]]:
        path = self.root / "jobs.json"
        path.write_text(json.dumps(jobs))
        command = [sys.executable, str(SCRIPT), str(self.model), str(path)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        environment |= {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}  # cores are shared
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500)
        assert done.returncode == 0, done.stderr
        results: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
        return results

    def digest(self, out: str) -> str:
        return open_folder(self.root / out).weights_sha256()


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return Runner(tmp_path)


def check(runner: Runner, *cases: tuple[str, str]) -> None:
    """Kill and resume a run of each (method, point), and compare it with an unbroken one."""
    methods = sorted({method for method, _ in cases})
    jobs = [runner.job(method, method) for method in methods]
    for number, (method, point) in enumerate(cases):
        jobs += [runner.job(f"out{number}", method, kill=point), runner.job(f"out{number}", method)]
    results = runner.run(*jobs)
    for whole in results[: len(methods)]:
        assert whole["code"] == 0, whole["output"]
    pairs = results[len(methods) :]
    for number, (method, point) in enumerate(cases):
        killed, resumed = pairs[2 * number : 2 * number + 2]
        assert killed["signal"] == 9, (method, point, killed["output"])
        assert resumed["code"] == 0, (method, point, resumed["output"])
        assert ("resuming: " in resumed["output"]) == (point != "before any layer"), (method, point)
        assert runner.digest(f"out{number}") == runner.digest(method), (method, point)
    left = {path.name for path in runner.root.iterdir()} - {"model", "text.txt", "jobs.json"}
    assert left == {*methods, *(f"out{number}" for number in range(len(cases)))}


def test_q11_gptq_goes_on_from_any_moment(runner: Runner) -> None:
    check(runner, *(("gptq", point) for point in POINTS))


def test_q11_every_method_goes_on_to_the_same_bits(runner: Runner) -> None:
    others = sorted(set(METHODS) - {"gptq"})
    check(runner, *((m, p) for m in others for p in ("in the second layer", "layer half written")))


def test_q11_another_question_starts_over(runner: Runner) -> None:
    kill = "in the last layer"
    jobs = [
        runner.job("whole", "gptq", "--bits", 8),
        runner.job("out", "gptq", "--bits", 4, kill=kill),
        runner.job("out", "gptq", "--bits", 8),
    ]
    *_, again = runner.run(*jobs)
    assert "starting over" in again["output"]
    assert "changed recipe" in again["output"]
    assert runner.digest("out") == runner.digest("whole")


def test_q11_a_resumed_run_keeps_its_number_of_threads(runner: Runner) -> None:
    """Sums depend on how torch shares them out: other threads would mix two runs."""
    jobs = [
        runner.job("whole", "gptq", "--threads", 2),
        runner.job("out", "gptq", "--threads", 2, kill="in the last layer"),
        runner.job("out", "gptq", "--threads", 1),
    ]
    *_, again = runner.run(*jobs)
    assert "2 threads, as the run began, not 1" in " ".join(again["output"].split())
    assert runner.digest("out") == runner.digest("whole")


def test_q11_activations_on_disk_are_resumed_from_disk(runner: Runner) -> None:
    """Killed with activations in memory or on disk, resumed in the other way: the same bits."""
    kill = "in the last layer"
    jobs = [runner.job("whole", "awq")]
    for spill in (False, True):
        jobs.append(runner.job(f"out{spill}", "awq", kill=kill, spill=spill))
        jobs.append(runner.job(f"out{spill}", "awq", spill=not spill))
    results = runner.run(*jobs)
    assert ["activations on disk" in result["output"] for result in results] == [
        *(False, False, True, True, False)
    ]
    assert {runner.digest(name) for name in ("outFalse", "outTrue")} == {runner.digest("whole")}
    assert not list(runner.root.glob("*resume*"))
