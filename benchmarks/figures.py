"""Figures of a benchmark: rows of its JSON, what they should reach, and how they fared."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A limit on `ratio` of the rows whose name matches `pattern`."""

    pattern: str
    limit: float
    at_most: bool = False

    def holds(self, ratio: float) -> bool:
        """Whether a ratio keeps to it."""
        return ratio <= self.limit if self.at_most else ratio >= self.limit

    def __str__(self) -> str:
        return f"{'≤' if self.at_most else '≥'} {self.limit:g}"


def row(
    name: str,
    value: float,
    unit: str,
    n: int,
    ratio: float | None = None,
    against: str | None = None,
) -> Row:
    """One figure; `n` repeats, `ratio` to what `against` names. Printed at once."""
    versus = "" if ratio is None or unit == "ratio" else f"  {ratio:.2f} × {against}"
    print(f"{name}: {value:.5g} {unit}{versus}", flush=True)
    figures = {"name": name, "value": value, "unit": unit}
    return figures | {"ratio": ratio, "against": against, "n": n}


def verdicts(rows: Sequence[Row], targets: Sequence[Target]) -> list[str]:
    """A line for each of our rows that a target speaks of and that has a ratio."""
    return [
        f"{'met   ' if target.holds(row['ratio']) else 'MISSED'} {row['name']}:"
        f" {row['ratio']:.3g} ({target}, against {row['against']})"
        for target in targets
        for row in rows
        if row["ratio"] is not None
        and "qdeploy" in row["name"]
        and re.search(target.pattern, row["name"])
    ]
