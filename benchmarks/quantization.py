"""What quantization costs on real models, every method at the same budget: one command, one JSON.

usage: quantization.py [--json FILE] [--only PATTERN] [--samples N] [--seqlen N] [--text FILE] …

Weights: each method at each scheme, quantized by the command, with a bf16 KV cache. KV cache: each
format on unquantized weights. All are scored against the same model unquantized with a bf16 KV
cache, on windows of 1,024 tokens, 2,048 apart. A row's `ratio` is to round-to-nearest at the same
scheme for a method. Size, time and peak memory are those of the `quantize` process.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from figures import Row, row
from quantization_cases import CASES, KV_POLICIES, MODELS, Case

from qdeploy.cli.environment import bound_spinning

QDEPLOY = (sys.executable, "-c", "from qdeploy.cli import main; main()")
METRICS = {"kl_mean": "nats", "perplexity": "perplexity", "top1_agreement": "top-1"}
Metrics = dict[str, float]


def main() -> None:
    """Measure, print a line per figure, and write the JSON after each case."""
    options = parse_options()
    bound_spinning()
    command = shlex.join(["python", "benchmarks/quantization.py", *sys.argv[1:]])
    machine = platform.processor() or platform.machine()
    rows: list[Row] = []
    for found in measured(options):
        rows += [one | {"command": command, "machine": machine} for one in found]
        if options.json is not None:
            options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--json", type=Path, help="file to write")
    add("--only", default="", help="run the cases whose `model | scheme | method` matches")
    add("--samples", type=int, default=32, help="of calibration")
    add("--seqlen", type=int, default=512)
    add("--text", type=Path, help="held-out text; the one that ships unless given")
    add("--windows", type=int, default=6)
    add("--ctx-len", type=int, default=1024)
    add("--backend", default="reference", help="that scores")
    add("--act", choices=("int8", "fp32"), help="of backend cpu")
    add("--model", help="measure this one instead")
    return parser.parse_args()


def measured(options: argparse.Namespace) -> Iterator[list[Row]]:
    """The rows of one case after the other."""
    models = MODELS if options.model is None else {Path(options.model).name: options.model}
    for name, model in models.items():
        rounding: dict[str, Metrics] = {}
        for case in CASES:
            title = f"{name} | {case.title} | {case.method}"
            own = options.model is not None or name in case.models
            if own and re.search(options.only, title):
                yield weight_rows(title, model, case, rounding, options)
        if re.search(options.only, f"{name} | KV"):
            yield kv_rows(name, model, options)


def weight_rows(
    title: str, model: str, case: Case, rounding: dict[str, Metrics], options: argparse.Namespace
) -> list[Row]:
    """Quantize and score; the first case of a scheme is what the others are compared with."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "artifact"
        told = quantize(model, case, out, options)
        metrics, tokens = score(out, model, [{"dtype": "bf16"}], options)[0]
    base = rounding.setdefault(case.title, metrics)
    rows = metric_rows(title, metrics, tokens, None if base is metrics else base)
    facts = (
        ("quantize", told["seconds"], "s"),
        ("peak memory", told["peak_rss_bytes"] / 1e6, "MB"),
        ("size", told["size_bytes"] / 1e6, "MB"),
    )
    return [*rows, *(row(f"{title} | {name}", value, unit, 1) for name, value, unit in facts)]


def quantize(model: str, case: Case, out: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run the command in a process of its own; its JSON."""
    recipe = {"model": model, **case.recipe}
    if case.method not in ("rtn", "fp8"):
        recipe["calibration"] = {"samples": options.samples, "seqlen": options.seqlen}
    file = out.with_suffix(".yaml")
    file.write_text(json.dumps(recipe), encoding="utf-8")  # JSON is YAML
    command = [*QDEPLOY, "quantize", "--recipe", str(file), "-o", str(out)]
    done = subprocess.run(
        [*command, "--eval", "none", "--json"], stdout=subprocess.PIPE, text=True, check=True
    )
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def kv_rows(name: str, model: str, options: argparse.Namespace) -> list[Row]:
    """Score every KV policy on unquantized weights."""
    from qdeploy.formats.sources import resolve_model

    keys = ("dtype", "block_size", "sink_blocks", "residual_blocks")
    policies = [dict(zip(keys, policy, strict=True)) for policy in KV_POLICIES]
    scored = score(resolve_model(model), model, policies, options)
    rows: list[Row] = []
    for (dtype, block, sink, residual), (metrics, tokens) in zip(KV_POLICIES, scored, strict=True):
        title = f"{name} | KV block {block}, sink {sink}, residual {residual} | {dtype}"
        rows += metric_rows(title, metrics, tokens, None)
    return rows


def score(
    artifact: Path, model: str, kv: Sequence[dict[str, Any]], options: argparse.Namespace
) -> list[tuple[Metrics, int]]:
    """Metrics and scored tokens per KV policy."""
    from qdeploy.evaluation.gate import parse_gate
    from qdeploy.evaluation.session import session
    from qdeploy.kv.config import KVCacheConfig
    from qdeploy.progress import Silent

    results = session(
        artifact,
        model,
        [KVCacheConfig(**policy) for policy in kv],
        parse_gate("kl<1000"),
        text=options.text,
        ctx_len=options.ctx_len,
        max_windows=options.windows,
        stride=2 * options.ctx_len,
        backend=options.backend,
        act=options.act,
        progress=Silent(),
    )
    return [(item.metrics, item.text.num_tokens) for item in results]


def metric_rows(title: str, metrics: Metrics, tokens: int, base: Metrics | None) -> list[Row]:
    """A row a metric; `n` is the number of tokens scored."""
    rows = []
    for metric, unit in METRICS.items():
        value = metrics[metric]
        ratio = value / base[metric] if base is not None and base[metric] else None
        against = None if ratio is None else "rtn"
        rows.append(row(f"{title} | {metric}", value, unit, tokens, ratio, against))
    return rows


if __name__ == "__main__":
    main()
