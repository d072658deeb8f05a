"""The table of docs/runtime-figures.md from the JSON of benchmarks/runtime.py.

usage: runtime_table.py FILE.json [PAGE.md]

With a page, what stands between its two marks is replaced; without one the table is printed.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from figures import Row
from runtime_sizes import TARGETS
from table import markdown

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"


def main() -> None:
    """Print the table, or put it into a page."""
    if len(sys.argv) not in (2, 3):
        raise SystemExit((__doc__ or "").strip())
    rows: list[Row] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    lines = runtime_table(rows)
    if len(sys.argv) == 2:
        print("\n".join(lines))
        return
    page = Path(sys.argv[2])
    page.write_text(with_table(page.read_text(encoding="utf-8"), lines), encoding="utf-8")


def with_table(page: str, lines: Sequence[str]) -> str:
    """The page with another table; SystemExit when it has no place for one."""
    if not (page.count(BEGIN) == page.count(END) == 1):
        raise SystemExit(f"the page must have one {BEGIN!r} and one {END!r}")
    before, rest = page.split(BEGIN)
    return "\n".join([before + BEGIN, *lines, END + rest.split(END)[1]])


def runtime_table(rows: Sequence[Row]) -> list[str]:
    """A line per figure; a goal stands where there is one, bold where it is missed."""
    lines = []
    for row in rows:
        _, figure, engine = row["name"].split(" | ")
        if engine.startswith("qdeploy KV ") and engine != "qdeploy KV int8":
            figure += f", {engine.removeprefix('qdeploy ')}"
        elif not engine.startswith("qdeploy"):
            figure += f": {engine}"
        ratio = "–" if row["ratio"] is None else f"{row['ratio']:.2f}"
        against = row["against"] or "–"
        lines.append([figure, _value(row), ratio, against, _goal(row)])
    return markdown(["figure (KV int8 unless named)", "value", "ratio", "to", "goal"], lines)


def _value(row: Row) -> str:
    value, unit = row["value"], row["unit"]
    if unit == "share":
        return f"{value:.1%}"
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def _goal(row: Row) -> str:
    found = [t for t in TARGETS if row["ratio"] is not None and re.search(t.pattern, row["name"])]
    return ", ".join(str(t) if t.holds(row["ratio"]) else f"**{t}**" for t in found) or "–"


if __name__ == "__main__":
    main()
