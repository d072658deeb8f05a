"""Accuracy gates: `kl<0.05,top1>0.9` as a value that judges metrics."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from qdeploy.errors import UsageError

#: Short names of the metrics that a gate may bound.
METRICS = {
    "kl": "kl_mean",
    "kl_p99": "kl_p99",
    "top1": "top1_agreement",
    "ppl": "perplexity",
    "ppl_ratio": "perplexity_ratio",
}
_OPERATORS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_CLAUSE = re.compile(r"\s*([a-z0-9_]+)\s*(<=|>=|<|>)\s*([0-9.eE+-]+)\s*")

#: Above this perplexity ratio a quantized model is broken, whatever was asked (user report Q20).
DEFAULT_GATE = "ppl_ratio<3"


@dataclass(frozen=True, slots=True)
class Clause:
    """One bound, e.g. kl < 0.05."""

    metric: str
    comparison: str
    bound: float

    def holds(self, metrics: Mapping[str, float]) -> bool:
        """NaN holds nothing."""
        return bool(_OPERATORS[self.comparison](metrics[METRICS[self.metric]], self.bound))

    def __str__(self) -> str:
        return f"{self.metric}{self.comparison}{self.bound:g}"


@dataclass(frozen=True, slots=True)
class Gate:
    """Clauses that must all hold."""

    clauses: tuple[Clause, ...]

    def failures(self, metrics: Mapping[str, float]) -> list[str]:
        """One line per clause that fails, with the measured value; empty when the gate passes."""
        return [
            f"{clause} failed: {metrics[METRICS[clause.metric]]:.4g}"
            for clause in self.clauses
            if not clause.holds(metrics)
        ]

    def __str__(self) -> str:
        return ",".join(map(str, self.clauses))


def parse_gate(text: str) -> Gate:
    """Parse `metric<bound,…`, or the same in a file (one clause a line, # comments).

    Raises UsageError that names the clause and the known metrics.
    """
    if not any(sign in text for sign in "<>"):
        try:
            lines = Path(text).read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise UsageError(
                f"gate {text!r}: neither clauses like kl<0.05,top1>0.9 nor a readable file "
                f"({error.strerror})"
            ) from None
        except UnicodeDecodeError:
            raise UsageError(f"gate file {text!r} is not UTF-8 text; convert it") from None
        text = ",".join(line.split("#")[0] for line in lines)
    clauses = [_parse_clause(part) for part in text.split(",") if part.strip()]
    if not clauses:
        raise UsageError(f"gate {text!r} holds no clause; write e.g. kl<0.05,top1>0.9")
    return Gate(tuple(clauses))


def _parse_clause(text: str) -> Clause:
    match = _CLAUSE.fullmatch(text)
    if match is None or match[1] not in METRICS:
        raise UsageError(
            f"gate clause {text.strip()!r} is not METRIC<NUMBER; metrics: {', '.join(METRICS)}"
        )
    try:
        return Clause(match[1], match[2], float(match[3]))
    except ValueError:
        raise UsageError(f"gate clause {text.strip()!r}: {match[3]!r} is not a number") from None
