"""Gates judge metrics; a gate that can't be read is the user's error."""

from __future__ import annotations

from pathlib import Path

import pytest

from qdeploy.errors import UsageError
from qdeploy.evaluation.gate import DEFAULT_GATE, parse_gate

METRICS = {
    "kl_mean": 0.1,
    "kl_p99": 0.5,
    "top1_agreement": 0.8,
    "perplexity": 30.0,
    "perplexity_ratio": 1.2,
}


@pytest.mark.parametrize(
    ("text", "failing"),
    [
        ("kl<0.2", 0),
        ("kl<0.1", 1),
        ("kl<=0.1", 0),
        ("kl<0.05,top1>0.9", 2),
        (" top1 >= 0.8 , ppl < 31 ", 0),
        ("kl_p99<1,ppl_ratio<1.1", 1),
    ],
)
def test_clauses_are_judged(text: str, failing: int) -> None:
    assert len(parse_gate(text).failures(METRICS)) == failing


@pytest.mark.parametrize(("ratio", "fails"), [(1.5, False), (3.5, True), (float("inf"), True)])
def test_q20_a_perplexity_ratio_above_3_fails_by_default(ratio: float, fails: bool) -> None:
    failures = parse_gate(DEFAULT_GATE).failures(METRICS | {"perplexity_ratio": ratio})
    assert bool(failures) == fails


def test_nan_passes_no_gate() -> None:
    assert parse_gate("kl<1").failures(METRICS | {"kl_mean": float("nan")})


@pytest.mark.parametrize("text", ["kl<", "kl=1", "speed<1", "<1", ",", "kl<1e", "kl<1;top1>2"])
def test_bad_gate_is_named(text: str) -> None:
    with pytest.raises(UsageError, match="gate") as caught:
        parse_gate(text)
    assert "\n" not in str(caught.value)


def test_gate_file(tmp_path: Path) -> None:
    path = tmp_path / "gate.txt"
    path.write_text("kl<0.2  # mean\n\n# nothing\ntop1>0.9\n")
    gate = parse_gate(str(path))
    assert str(gate) == "kl<0.2,top1>0.9"
    assert gate.failures(METRICS) == ["top1>0.9 failed: 0.8"]


def test_missing_gate_file() -> None:
    with pytest.raises(UsageError, match="nowhere"):
        parse_gate("nowhere.txt")
