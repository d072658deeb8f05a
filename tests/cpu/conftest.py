"""What every test of compiled kernels needs: kernels."""

from __future__ import annotations

import pytest

from qdeploy_kernels.cpu.library import ISA_VARIABLE, available_isas

ISAS = available_isas()


@pytest.fixture(scope="session", autouse=True)
def _compiled() -> None:
    assert ISAS, "no compiled CPU kernels here: run `make kernels`, which needs a C++17 compiler"


@pytest.fixture(params=ISAS or ["none"])
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each instruction set in turn; executors that are loaded in the test use it."""
    monkeypatch.setenv(ISA_VARIABLE, request.param)
    chosen: str = request.param
    return chosen
