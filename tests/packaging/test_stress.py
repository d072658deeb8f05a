"""The C ABI under AddressSanitizer, UBSan and ThreadSanitizer: kernels/cpp/tests/stress.cpp."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from qdeploy_kernels.cpu.library import available_isas

CHECKOUT = Path(__file__).parents[2]


def stress(
    sanitizers: str, isas: list[str], cases: int, folder: Path
) -> subprocess.CompletedProcess[str]:
    """Build the stress programs with sanitizers, in a folder, and run them."""
    variables = {"SANITIZE": sanitizers, "ISAS": " ".join(isas), "STRESS_ARGS": str(cases)}
    variables |= {"STRESS_BUILD": str(folder)}
    return subprocess.run(
        ["make", "-C", str(CHECKOUT), "kernels-asan", *(f"{k}={v}" for k, v in variables.items())],
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("sanitizers", "cases"), [("address,undefined", 25), ("thread", 15)], ids=["asan", "tsan"]
)
def test_random_models_and_steps_are_clean(sanitizers: str, cases: int, tmp_path: Path) -> None:
    isas = available_isas()
    assert isas
    if sanitizers == "thread":  # threads are the same code in all of them
        isas = isas[:1]
    done = stress(sanitizers, isas, cases, tmp_path)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-4000:]
    for isa in isas:
        assert f"{isa}: {cases} cases, from seed 1" in done.stdout
