"""When a sample ends: tokens, length, and stop strings in its text."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from qdeploy.runtime.outputs import FinishReason
from qdeploy.runtime.request import Request


@dataclass(frozen=True, slots=True)
class Stop:
    """Why a sample ended; reason is the stop string or token id, None for eos and length."""

    finish_reason: FinishReason
    reason: str | int | None = None
    by_token: bool = False


def check_token_stop(request: Request, eos_token_ids: Set[int]) -> Stop | None:
    """Look at the last token, then at the length. eos and stop tokens win over length."""
    token, params, num_tokens = request.token_ids[-1], request.params, request.num_output_tokens
    if num_tokens >= params.min_tokens:
        if token in eos_token_ids and not params.ignore_eos:
            return Stop("stop", by_token=True)
        if token in (params.stop_token_ids or ()):
            return Stop("stop", token, by_token=True)
    if num_tokens >= request.max_tokens:
        return Stop("length")
    return None


class StopStrings:
    """Passes text on, holding back what may yet become a stop string.

    `push` returns the text that is safe to show and the stop string found, if any; text from a
    stop string on is dropped (the string itself is kept with include_stop).
    """

    def __init__(self, stop: Sequence[str], *, include_stop: bool = False) -> None:
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._held = ""

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Add text. With may_stop False (min_tokens not reached) everything passes."""
        if not self._stop or not may_stop:
            held, self._held = self._held, ""
            return held + text, None
        self._held += text
        found = self._first_match()
        if found is not None:
            start, stop = found
            shown = self._held[: start + len(stop) if self._include_stop else start]
            self._held = ""
            return shown, stop
        keep = self._longest_partial()
        shown = self._held[: len(self._held) - keep]
        self._held = self._held[len(shown) :]
        return shown, None

    def flush(self) -> str:
        """What was held back; call when the sample ends for another reason."""
        held, self._held = self._held, ""
        return held

    def _first_match(self) -> tuple[int, str] | None:
        """The match that ends first, since that token would have stopped generation."""
        hits = [(self._held.find(s), s) for s in self._stop]
        ends = [(at + len(s), at, s) for at, s in hits if at >= 0]
        if not ends:
            return None
        _, start, stop = min(ends)
        return start, stop

    def _longest_partial(self) -> int:
        """Length of the longest tail of the held text that begins a stop string."""
        longest = min(len(self._held), max(len(s) for s in self._stop) - 1)
        for size in range(longest, 0, -1):
            tail = self._held[-size:]
            if any(s.startswith(tail) for s in self._stop):
                return size
        return 0
