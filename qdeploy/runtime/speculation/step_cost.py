"""Measured seconds of a step by its number of tokens. Decides speed only, never a token."""

from __future__ import annotations

_EXACT = 32  # step sizes up to this one are kept apart
_TRUSTED = 3  # visits before a measurement counts
_DOWN, _UP = 0.3, 0.1  # a fast step says more than a slow one, which a neighbour may have caused
_CLIP = 2.0
_HOPEFUL_SLOPE = 0.05  # of the smallest step, for each further token, until it is measured
_FRESH_NOTES = 16  # predictions are made anew after so many measurements


class StepCost:
    """Learns from every step. A size that wasn't measured is assumed to be cheap, so that it gets
    tried where it promises something.

    More tokens never cost less: a size that was measured on a bad moment is corrected by the
    larger ones.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._visits: dict[int, int] = {}
        self._points: list[tuple[int, float]] = []
        self._known: dict[int, float] = {}
        self._notes = 0

    def note(self, num_tokens: int, seconds: float) -> None:
        """A step of num_tokens ≥ 1 took that long."""
        size = _size(num_tokens)
        old = self._seconds.get(size, seconds)
        rate = _DOWN if seconds < old else _UP
        self._seconds[size] = old + rate * (min(seconds, _CLIP * old) - old)
        self._visits[size] = self._visits.get(size, 0) + 1
        self._notes += 1
        if self._notes % _FRESH_NOTES == 0 or self._visits[size] <= _TRUSTED:
            self._refresh()

    def __call__(self, num_tokens: int) -> float:
        """Predicted seconds of a step of num_tokens; 0 as long as nothing was measured."""
        known = self._known.get(num_tokens)
        if known is None:
            known = self._known[num_tokens] = self._predict(num_tokens)
        return known

    def _refresh(self) -> None:
        self._known.clear()
        trusted = {s: t for s, t in self._seconds.items() if self._visits[s] >= _TRUSTED}
        self._points = sorted((trusted or self._seconds).items())
        for i in range(len(self._points) - 2, -1, -1):
            size, seconds = self._points[i]
            self._points[i] = size, min(seconds, self._points[i + 1][1])

    def _predict(self, num_tokens: int) -> float:
        if not self._points:
            return 0.0
        hopeful = _HOPEFUL_SLOPE * self._points[0][1]
        below = self._points[0]
        for size, seconds in self._points:
            if num_tokens <= size:
                if num_tokens == size:
                    return seconds
                share = (num_tokens - below[0]) / max(size - below[0], 1)
                line = below[1] + share * (seconds - below[1])
                return min(line, below[1] + hopeful * max(num_tokens - below[0], 0))
            below = size, seconds
        return below[1] + hopeful * (num_tokens - below[0])


def _size(num_tokens: int) -> int:
    """Sizes that share a measurement: exact while small, then within a few percent."""
    if num_tokens <= _EXACT:
        return num_tokens
    grain = 1 << (num_tokens.bit_length() - 4)
    return -(-num_tokens // grain) * grain
