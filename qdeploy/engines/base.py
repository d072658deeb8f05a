"""What another quantizer must do for us, and the words for when its package is missing."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from qdeploy.errors import CalibrationError, UsageError
from qdeploy.quantization.scheme import QuantScheme


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineJob:
    """One run of an engine.

    folder: the dense model; out: the folder that it writes, which doesn't exist yet
    method: of the recipe; scheme: of every layer but those in `dense`, full names
    sequences: token ids, 1 … seqlen each; trust_remote_code: code in the folder may run
    """

    folder: Path
    out: Path
    method: str
    scheme: QuantScheme
    dense: tuple[str, ...]
    sequences: Sequence[Sequence[int]]
    seqlen: int
    trust_remote_code: bool = False


class Engine(Protocol):
    """Quantizes a dense model folder into a checkpoint folder of its own format."""

    def check(self, method: str, scheme: QuantScheme, dense: Sequence[str]) -> None:
        """Raise UsageError for what it can't do, and when its package isn't installed."""

    def quantize(self, job: EngineJob) -> None:
        """Write `job.out`; what the tool itself raises becomes a CalibrationError."""

    def version(self) -> str:
        """Of its package."""


def require_package(engine: str, module: str, requirement: str) -> None:
    """Raise UsageError, with the pip command, unless the module is there."""
    if importlib.util.find_spec(module) is None:
        raise UsageError(
            f"engine {engine} needs a package that isn't installed; run: pip install {requirement}",
            param="engine",
        )


def imported(engine: str, module: str) -> Any:
    """The package's module; UsageError when it can't be imported with what else is installed."""
    try:
        return importlib.import_module(module)
    except Exception as error:
        cause = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(
            f"engine {engine}: its package can't be imported ({cause}); use --engine native",
            param="engine",
        ) from error


@contextmanager
def guarded(engine: str) -> Iterator[None]:
    """What the tool raises becomes a CalibrationError of one line."""
    try:
        yield
    except Exception as error:
        cause = f"{type(error).__name__}: {error}".splitlines()[0]
        raise CalibrationError(f"engine {engine}: {cause}; use --engine native") from error


def require_method(engine: str, expected: str, method: str) -> None:
    """Raise UsageError unless the recipe's method is what the engine does."""
    if method != expected:
        raise UsageError(
            f"engine {engine} does method {expected}, not {method}; use --method {expected} or "
            "--engine native",
            param="engine",
        )
