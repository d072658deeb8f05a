"""Other engines that read our checkpoints: what `make readers` measured.

readers.json beside this file holds one row for each format, scheme and engine that was tried in
tests/interop/test_readers.py; it is written by that suite, never by hand.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from qdeploy.quantization.scheme import QuantScheme

_FILE = Path(__file__).with_name("readers.json")
#: Largest difference of a logit, of the largest logit, that passes for the same logits: gptqmodel's
#: 4-bit kernels compute in bfloat16 (0.05 on a random model); rounding activations to int8 gives
#: 0.08, a wrong zero point 0.4.
SAME_LOGITS = 0.07


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """One engine on one kind of checkpoint.

    kind: see kind_of; needs: packages beside the engine, and options
    error: largest difference of a logit from ours, of the largest logit; None: it didn't load
    """

    format: str
    kind: str
    engine: str
    needs: str
    error: float | None

    @property
    def agrees(self) -> bool:
        """Whether the engine gave logits like ours."""
        return self.error is not None and self.error < SAME_LOGITS


def kind_of(schemes: Iterable[QuantScheme]) -> str:
    """What readers differ in beside the format: `W4A16`, `W4A16, activation order`, `mixed`, …"""
    found = set(schemes)
    names = {scheme.name for scheme in found}
    if len(names) > 1:
        return "mixed" if all(s.number == "int" for s in found) else "mixed with FP8"
    order = any(scheme.act_order for scheme in found)
    return names.pop() + (", activation order" if order else "")


def measured_readers() -> tuple[Reader, ...]:
    """The rows of readers.json."""
    return tuple(Reader(**row) for row in json.loads(_FILE.read_text(encoding="utf-8")))


def readers_for(format: str, schemes: Iterable[QuantScheme]) -> list[str]:
    """Engines, with what they need, that gave our logits on such a checkpoint in our tests."""
    tried = _tried(format, schemes)
    return [f"{reader.engine} (needs {reader.needs})" for reader in tried if reader.agrees]


def readers_that_fail(format: str, schemes: Iterable[QuantScheme]) -> list[str]:
    """Engines that were tried on such a checkpoint and didn't give our logits."""
    return [
        f"{reader.engine} (with {reader.needs}: {fault(reader)})"
        for reader in _tried(format, schemes)
        if not reader.agrees
    ]


def _tried(format: str, schemes: Iterable[QuantScheme]) -> list[Reader]:
    kind = kind_of(schemes)
    return [each for each in measured_readers() if (each.format, each.kind) == (format, kind)]


def fault(reader: Reader) -> str:
    """What went wrong with a reader that doesn't agree."""
    if reader.error is None:
        return "doesn't load"
    return f"logits differ by {reader.error:.0%}"
