"""Runs of the command that are killed, in processes of their own; test_killed_runs.py starts this.

usage: killed_runs.py MODEL JOBS.json

A job is {"args": [...], "kill": POINT or null, "spill": whether activations go to disk}. Each is a
process forked from this one, which has imported everything and computed nothing. Prints
{"signal", "code", "output"} of each as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import qdeploy.calibration.resume as resume
import qdeploy.pipeline as pipeline
from qdeploy.calibration.layers import LayerRunner
from qdeploy.calibration.walk import DecoderWalk
from qdeploy.cli import app
from qdeploy.formats.hf import open_folder


def die(*_: object, **__: object) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def at(owner: Any, name: str, call: int, *, after: bool = False) -> None:
    """Die at the beginning of the call with this number, or at its end."""
    original: Callable[..., Any] = getattr(owner, name)
    calls = iter(range(call + 1))

    def patched(*args: Any, **kwargs: Any) -> Any:
        last = next(calls) == call
        if last and not after:
            die()
        result = original(*args, **kwargs)
        if last:
            die()
        return result

    setattr(owner, name, patched)


def half_written(call: int) -> None:
    """Die when half of a layer's bytes are in its file."""
    original = resume.save_file
    calls = iter(range(call + 1))

    def patched(tensors: Any, path: str, **options: Any) -> None:
        original(tensors, path, **options)
        if next(calls) == call:
            os.truncate(path, Path(path).stat().st_size // 2)
            die()

    resume.save_file = patched  # type: ignore[assignment]


def half_of_the_inputs(call: int) -> None:
    """Die when the next layer's inputs are written but for the last batch."""
    original = resume.write_batches
    calls = iter(range(call + 1))

    def patched(folder: Path, batches: Any) -> int:
        if next(calls) == call:
            original(folder, list(batches)[:-1])
            die()
        return original(folder, batches)

    resume.write_batches = patched


POINTS: dict[str, Callable[[], None]] = {
    "before any layer": lambda: at(LayerRunner, "run", 0),
    "in the second layer": lambda: at(LayerRunner, "run", 1),
    "in the last layer": lambda: at(LayerRunner, "run", 2),
    "inputs half written": lambda: half_of_the_inputs(1),
    "layer half written": lambda: half_written(1),
    "layer written, old inputs still there": lambda: at(resume, "_write", 1, after=True),
    "all layers done": lambda: at(pipeline._Run, "_copy_rest", 0),
    "artifact not yet renamed": lambda: at(pipeline.ArtifactWriter, "_publish", 0),
}


def run(job: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryFile("w+") as output:
        child = os.fork()
        if not child:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            if job["spill"]:
                planned = pipeline.plan_memory
                pipeline.plan_memory = lambda *a, **k: replace(planned(*a, **k), spill=True)
            if job["kill"]:
                POINTS[job["kill"]]()
            code = 0
            try:
                app([str(arg) for arg in job["args"]])
            except SystemExit as stop:
                code = int(stop.code or 0)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)
        _, status = os.waitpid(child, 0)
        output.seek(0)
        text = output.read()
    signalled = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    return {"signal": signalled, "code": os.waitstatus_to_exitcode(status), "output": text}


if __name__ == "__main__":
    DecoderWalk(open_folder(sys.argv[1]))  # imports the architecture
    jobs = json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    print(json.dumps([run(job) for job in jobs]))
