"""Where a server's start spends its time."""

from __future__ import annotations

import time


class Stopwatch:
    """Seconds by phase, from its making on."""

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self.phases: dict[str, float] = {}

    def lap(self, phase: str) -> None:
        """The time since the last lap was this phase's."""
        now = time.perf_counter()
        self.phases[phase] = now - self._last
        self._last = now

    def __str__(self) -> str:
        parts = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in self.phases.items())
        return f"{self._last - self._start:.2f} s: {parts}"
