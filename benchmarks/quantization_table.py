"""The tables of docs/quantization-figures.md from the JSON of benchmarks/quantization.py.

usage: quantization_table.py FILE.json [PAGE.md]

With a page, what stands between its two marks is replaced; without one the tables are printed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from figures import Row
from quantization_cases import PEERS
from runtime_table import with_table
from table import markdown

HEADS = ("KL", "perplexity", "top-1")
METRICS = ("kl_mean", "perplexity", "top1_agreement")
FACTS = ("quantize", "peak memory", "size")


def main() -> None:
    """Print the tables, or put them into a page."""
    if len(sys.argv) not in (2, 3):
        raise SystemExit((__doc__ or "").strip())
    rows: list[Row] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    lines = [*weight_table(rows), "", *kv_table(rows)]
    if len(sys.argv) == 2:
        print("\n".join(lines))
        return
    page = Path(sys.argv[2])
    page.write_text(with_table(page.read_text(encoding="utf-8"), lines), encoding="utf-8")


def weight_table(rows: Sequence[Row]) -> list[str]:
    """A line per artifact; the least KL of a scheme is bold."""
    found = _by_case(rows)
    cases = [key for key in found if not key[1].startswith("KV ")]
    best: dict[tuple[str, str], float] = {}
    for key in cases:
        scheme, value = key[:2], found[key]["kl_mean"]
        best[scheme] = min(best.get(scheme, value), value)
    lines = []
    for key in cases:
        model, scheme, method = key
        figures = found[key]
        kl = _figure("kl_mean", figures["kl_mean"])
        peer = PEERS.get((scheme, method)) if model.startswith("SmolLM2") else None
        lines.append(
            [
                f"{model}, {scheme}, {method}",
                f"**{kl}**" if figures["kl_mean"] == best[key[:2]] else kl,
                *(_figure(name, figures[name]) for name in METRICS[1:]),
                "–" if peer is None else f"{peer[0]:.3g} ({peer[1]})",
                *(f"{figures[name]:,.0f}" for name in FACTS),
            ]
        )
    return markdown(["weights", *HEADS, "best peer's KL", "s", "peak MB", "MB"], lines)


def kv_table(rows: Sequence[Row]) -> list[str]:
    """A line per KV policy."""
    lines = [
        [f"{model}, {dtype}, {policy.removeprefix('KV ')}"]
        + [_figure(name, figures[name]) for name in METRICS]
        for (model, policy, dtype), figures in _by_case(rows).items()
        if policy.startswith("KV ")
    ]
    return markdown(["KV cache, weights as they are", *HEADS], lines)


def _by_case(rows: Sequence[Row]) -> dict[tuple[str, str, str], dict[str, float]]:
    found: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in rows:
        model, scheme, method, figure = row["name"].split(" | ")
        found.setdefault((model, scheme, method), {})[figure] = row["value"]
    return found


def _figure(name: str, value: float) -> str:
    if name == "kl_mean":
        return f"{value:.2g}" if value < 0.01 else f"{value:.3f}"
    return f"{value:.2f}" if name == "perplexity" else f"{value:.3f}"


if __name__ == "__main__":
    main()
