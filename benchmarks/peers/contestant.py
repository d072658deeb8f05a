"""What runs a load: an engine behind a driver process, or llama.cpp's own benchmark."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

DRIVERS = Path(__file__).parent
WARM_UP_SEED = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """`batch` requests at once, each with a random prompt and an exact number of output tokens."""

    batch: int
    prompt: int
    output: int

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache holds at the end."""
        return self.batch * (self.prompt + self.output)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One run of a load; rates are in tokens per second.

    first_s: until every request had a token. late_tokens: tokens after that, up to total_s.
    extras: what only some engines tell.
    """

    load: Load
    first_s: float
    total_s: float
    late_tokens: int
    extras: dict[str, float]

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens over the time to the first token (of the last request)."""
        return self.load.batch * self.load.prompt / self.first_s

    @property
    def decode_rate(self) -> float:
        """Output tokens over the time in which no prompt is left to read."""
        return self.late_tokens / (self.total_s - self.first_s)

    @property
    def end_to_end_rate(self) -> float:
        """All output tokens over all the time, prefill included."""
        return self.load.batch * self.load.output / self.total_s


class Contestant(Protocol):
    """An engine with its weights and KV format; `ours` or a peer. Opened before `run`."""

    name: str
    ours: bool

    def open(self, load: Load) -> None:
        """Load the model and warm up for loads of this size."""

    def run(self, load: Load, seed: int) -> Timing:
        """Run a load once; other seeds give other prompts."""

    def close(self) -> None:
        """Free everything; safe to call twice."""


class DriverFailure(RuntimeError):
    """An engine's process failed; the message has the end of what it printed."""


class DriverProcess:
    """An engine behind a driver script, started with `python` and told `options` as JSON."""

    def __init__(
        self, name: str, python: str, script: str, options: dict[str, Any], *, ours: bool = False
    ) -> None:
        self.name, self.ours = name, ours
        self._command = [python, str(DRIVERS / script), json.dumps(options)]
        self._process: subprocess.Popen[str] | None = None

    def open(self, load: Load) -> None:
        """Start, and run the load once."""
        self.start()
        self.run(load, WARM_UP_SEED)

    def start(self) -> None:
        """Start the process and wait until the model is loaded."""
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ | {"TOKENIZERS_PARALLELISM": "false"},
        )
        self._answer()

    def run(self, load: Load, seed: int) -> Timing:
        """Send a load, wait for its timing."""
        told = self.tell(asdict(load) | {"seed": seed})
        times = {key: told.pop(key) for key in ("first_s", "total_s", "late_tokens")}
        return Timing(load=load, extras=told, **times)

    def tell(self, load: dict[str, Any]) -> dict[str, Any]:
        """Send what a driver takes as a load, wait for its answer."""
        if self._process is None or self._process.stdin is None:
            raise DriverFailure(f"{self.name}: open it before running a load")
        self._process.stdin.write(json.dumps(load) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End the process."""
        if self._process is None:
            return
        self._process.communicate()  # closes stdin, upon which the driver ends
        self._process = None
        self._log.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        self._process.wait()
        self._log.seek(0)
        raise DriverFailure(f"{self.name} failed:\n{self._log.read()[-2000:]}")


class LlamaCpp:
    """llama.cpp through llama-batched-bench, which decodes without sampling. One process a run."""

    ours = False

    def __init__(
        self, name: str, folder: Path, model: Path, *, threads: int, kv: str = "f16"
    ) -> None:
        self.name = name
        self._command = [str(folder / "llama-batched-bench"), "-m", str(model)]
        self._command += ["-t", str(threads), "-ctk", kv, "-ctv", kv, "--output-format", "jsonl"]

    def open(self, load: Load) -> None:
        """Nothing stays loaded between runs, and each warms itself up."""

    def run(self, load: Load, seed: int) -> Timing:
        """Its prompts are random anyway. The first token counts as the prefill's, as elsewhere."""
        decoded = load.output - 1
        sizes = {"-npp": load.prompt, "-ntg": decoded, "-npl": load.batch, "-c": load.kv_tokens}
        command = self._command + [str(word) for pair in sizes.items() for word in pair]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode or not lines:
            raise DriverFailure(f"{self.name} failed:\n{done.stderr[-2000:]}")
        # Rates of nothing are printed as C prints them: nan, -nan, inf.
        told = json.loads(re.sub(r": *-?(nan|inf)\b", ": null", lines[-1]))
        return Timing(
            load=load,
            first_s=told["t_pp"],
            total_s=told["t_pp"] + told["t_tg"],
            late_tokens=load.batch * decoded,
            extras={},
        )

    def close(self) -> None:
        """Nothing to free."""


def ours(name: str, model: Path, options: dict[str, Any]) -> DriverProcess:
    """qdeploy, in this Python."""
    driver = options | {"model": str(model)}
    return DriverProcess(name, sys.executable, "qdeploy_driver.py", driver, ours=True)


def openvino(name: str, python: str, model: Path, *, threads: int, kv: str) -> DriverProcess:
    """OpenVINO GenAI in its own Python; `kv` is its KV_CACHE_PRECISION."""
    options = {"model": str(model), "threads": threads, "kv": kv}
    return DriverProcess(name, python, "openvino_driver.py", options)


def openvino_lookup(python: str, model: Path, *, threads: int) -> DriverProcess:
    """OpenVINO GenAI with prompt lookup; `tell` it what its driver says."""
    options = {"model": str(model), "threads": threads, "kv": "u8"}
    return DriverProcess("OpenVINO prompt lookup", python, "openvino_lookup_driver.py", options)


def vllm(name: str, python: str, model: Path, load: Load, *, threads: int) -> DriverProcess:
    """vLLM's CPU build in its own Python, with room for the load."""
    options = {"model": str(model), "threads": threads, "batch": load.batch}
    options |= {"max_model_len": load.prompt + load.output}
    return DriverProcess(name, python, "vllm_driver.py", options)
