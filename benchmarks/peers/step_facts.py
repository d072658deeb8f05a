"""What decode steps of the cpu backend take: engine, raw C++ call, and memory's bound."""

from __future__ import annotations

import statistics
import time
from typing import Any

READ_REPEATS = 5


class StepFacts:
    """Watches an executor's C++ calls; `note` after each engine step, `told` at a load's end."""

    def __init__(self, executor: Any) -> None:
        self._executor, self._raw = executor, 0.0
        self._steps: list[tuple[float, float]] = []
        cdll = executor.model.library.cdll
        execute = cdll.qd_execute

        def timed_execute(*arguments: Any) -> int:
            begin = time.perf_counter()
            failed: int = execute(*arguments)
            self._raw = time.perf_counter() - begin
            return failed

        cdll.qd_execute = timed_execute

    def start(self) -> None:
        """Forget the last load."""
        self._steps.clear()

    def note(self, seconds: float) -> None:
        """The last engine step decoded every request and took that long."""
        self._steps.append((seconds, self._raw))

    def told(self, kv_tokens: int) -> dict[str, float]:
        """Means over the decode steps, and the time to stream what such a step reads.

        The first one may hold the end of a prompt and is left out.
        """
        steps = self._steps[1:]
        if not steps:
            return {}
        model = self._executor.model
        num_bytes = model.weight_bytes + kv_tokens * self._kv_bytes_per_token()
        return {
            "step_s": statistics.fmean(whole for whole, _ in steps),
            "raw_step_s": statistics.fmean(raw for _, raw in steps),
            "step_bytes": num_bytes,
            "read_s": model.read_seconds(int(num_bytes), READ_REPEATS),
        }

    def _kv_bytes_per_token(self) -> float:
        executor = self._executor
        sizes = zip(executor.open_block_bytes, executor.sealed_block_bytes, strict=True)
        block = sum(sealed or opened for opened, sealed in sizes)
        return block / executor.kv_config.block_size
