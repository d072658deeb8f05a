"""Recompute a preempted sequence, or keep its K/V on the host? By measured cost."""

from __future__ import annotations

from dataclasses import dataclass

from qdeploy.errors import UsageError

PREEMPTION_MODES = ("auto", "recompute", "swap")
_KEEP = 0.8  # of the older measurements, per new one
_LEAST_TOKENS = 16  # a step with fewer tokens of prompts says little about prompts


def check_preemption(mode: str, swap_space_bytes: int) -> None:
    """UsageError for an unknown mode, and for one that asks for space which isn't given."""
    if mode not in PREEMPTION_MODES:
        raise UsageError(
            f"preemption={mode!r} is unknown; choose one of {', '.join(PREEMPTION_MODES)}",
            param="preemption",
        )
    if swap_space_bytes < 0:
        raise UsageError(
            f"swap_space={swap_space_bytes} is negative; give 0 or more bytes", param="swap_space"
        )
    if mode == "swap" and swap_space_bytes == 0:
        raise UsageError(
            "preemption=swap needs swap_space above 0; give some, or preemption=recompute",
            param="swap_space",
        )


@dataclass(slots=True, kw_only=True)
class PreemptionPolicy:
    """mode: one of PREEMPTION_MODES. The initial costs are of a small model on a few cores; the
    first steps replace them.
    """

    mode: str = "auto"
    seconds_per_token: float = 1e-3
    seconds_per_byte: float = 1e-9
    _measured_tokens: bool = False
    _measured_bytes: bool = False

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
