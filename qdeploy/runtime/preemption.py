"""Recompute a preempted sequence, or keep its K/V on the host? By measured cost."""

from __future__ import annotations

from dataclasses import dataclass

from qdeploy.errors import UsageError

PREEMPTION_MODES = ("auto", "recompute", "swap")
_KEEP = 0.8  # of the older measurements, per new one
_LEAST_TOKENS = 16  # a step with fewer tokens of prompts says little about prompts


@dataclass(slots=True, kw_only=True)
class PreemptionPolicy:
    """mode: auto, recompute or swap. The initial costs are of a small model on a few cores; the
    first steps replace them.
    """

    mode: str = "auto"
    seconds_per_token: float = 1e-3
    seconds_per_byte: float = 1e-9
    _measured_tokens: bool = False
    _measured_bytes: bool = False

    def __post_init__(self) -> None:
        if self.mode not in PREEMPTION_MODES:
            raise UsageError(
                f"preemption={self.mode!r} is unknown; choose one of {', '.join(PREEMPTION_MODES)}",
                param="preemption",
            )

    def prefers_swap(self, num_tokens: int, num_bytes: int) -> bool:
        """Whether moving num_bytes out and in again costs less than computing num_tokens."""
        if self.mode != "auto":
            return self.mode == "swap"
        return 2 * num_bytes * self.seconds_per_byte < num_tokens * self.seconds_per_token

    def note_step(self, num_prompt_tokens: int, num_tokens: int, seconds: float) -> None:
        """A step has computed num_tokens, of which num_prompt_tokens were of prompts."""
        if num_prompt_tokens < max(_LEAST_TOKENS, num_tokens // 2):
            return
        new = seconds / num_tokens
        self.seconds_per_token = _average(self.seconds_per_token, new, self._measured_tokens)
        self._measured_tokens = True

    def note_copy(self, num_bytes: int, seconds: float) -> None:
        """num_bytes were copied from or to the pools."""
        if num_bytes:
            new = seconds / num_bytes
            self.seconds_per_byte = _average(self.seconds_per_byte, new, self._measured_bytes)
            self._measured_bytes = True


def _average(old: float, new: float, measured: bool) -> float:
    return _KEEP * old + (1 - _KEEP) * new if measured else new
