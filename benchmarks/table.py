"""The README's CPU tables from the JSON of benchmarks/cpu.py.

usage: table.py FILE.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

OURS = "qdeploy"
PEERS = ("llama.cpp", "OpenVINO", "vLLM")
Row = dict[str, Any]


def main() -> None:
    """Print both tables as Markdown."""
    if len(sys.argv) != 2:
        raise SystemExit((__doc__ or "").strip())
    rows: list[Row] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    print("\n".join([*rate_table(rows), "", *fact_table(rows)]))


def rate_table(rows: Sequence[Row]) -> list[str]:
    """Tokens per second: a line per workload and per variant of ours, beside each peer's best."""
    rates = [(*row["name"].split(" | "), row) for row in rows if row["unit"] == "tok/s"]
    peers = [peer for peer in PEERS if any(rate[2].startswith(peer) for rate in rates)]
    heads = ["tok/s", OURS, *peers, "× best peer"]
    lines = []
    for model, title, engine, row in rates:
        if not engine.startswith(OURS):
            continue
        theirs = [
            _best(
                other["value"]
                for m, t, name, other in rates
                if (m, t) == (model, title) and name.startswith(peer)
            )
            for peer in peers
        ]
        ratio = "–" if row["ratio"] is None else f"**{row['ratio']:.2f}**"
        variant = engine.removeprefix(OURS).strip()
        lines.append([f"{model}, {title}: {variant}", _number(row["value"]), *theirs, ratio])
    return markdown(heads, lines)


def fact_table(rows: Sequence[Row]) -> list[str]:
    """Everything that isn't a rate: bounds, overheads, KV formats compared, KL."""
    lines = []
    for row in rows:
        if row["unit"] != "tok/s":
            model, title, engine = row["name"].split(" | ")
            name = f"{model}, {title}: {engine.removeprefix(OURS).strip()}".removesuffix(": ")
            unit = "" if row["unit"] == "ratio" else f" {row['unit']}"
            lines.append([name, f"{row['value']:.3g}{unit}", row["against"] or "–"])
    return markdown(["figure", OURS, "against"], lines)


def _best(values: Iterable[float]) -> str:
    found = list(values)
    return _number(max(found)) if found else "–"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def markdown(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """A table whose first column is text, and the others numbers."""
    rule = "|".join(["---"] + ["---:"] * (len(heads) - 1))
    return [_line(heads), f"|{rule}|", *map(_line, lines)]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
