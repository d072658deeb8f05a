"""How many tokens to draft for each request: what gives the most tokens a second."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

#: Speculating must promise that much more than not speculating: predictions are noisy.
MARGIN = 1.02
_LEAST_GAIN = 0.005  # expected tokens below which a further draft isn't considered

#: Expected tokens of a draft, minus its place in the proposal, and its request.
_Gain = tuple[float, int, int]


@dataclass(slots=True)
class Acceptance:
    """A decaying estimate of how often a draft is accepted, given that those before it were.

    keep: what a test leaves of older ones.
    """

    accepted: float = 0.0
    tested: float = 0.0
    keep: float = 0.9

    def update(self, accepted: bool) -> None:
        """A draft was tested."""
        self.accepted = self.keep * self.accepted + accepted
        self.tested = self.keep * self.tested + 1

    def rate(self, prior: float, weight: float) -> float:
        """The estimate, with `weight` tests at the rate `prior` added."""
        return (self.accepted + weight * prior) / (self.tested + weight)


def best_counts(
    rates: Sequence[Sequence[float]],
    step_seconds: Callable[[int], float],
    draft_seconds: Callable[[int], float],
) -> tuple[list[int], float]:
    """Drafts for each request that maximize expected tokens per second, and the gain over none.

    rates: for each request and draft the chance that it is accepted if those before it were.
    step_seconds(tokens): of a step; draft_seconds(requests): of one more draft each for so many.
    Expected tokens of k drafts: 1 + rate₁ + rate₁·rate₂ + … (Leviathan et al. 2023, eq. 1, for
    rates that differ). A further draft never is worth more than the one before it, so that the
    best m drafts over all requests are those of the m largest gains. A round of drafting may cost
    the same for one request as for all, so that every number of rounds is tried.
    """
    plain = step_seconds(len(rates))
    if plain <= 0:  # nothing was measured yet
        return [0] * len(rates), 1.0
    gains = sorted(_gains(rates), reverse=True)
    deepest = max(map(len, rates), default=0)
    free = draft_seconds(1) <= 0
    best, chosen = MARGIN * len(rates) / plain, list[_Gain]()
    for depth in range(deepest if free else 1, deepest + 1):
        within = [gain for gain in gains if gain[1] >= -depth]
        rate, taken = _best_prefix(within, len(rates), step_seconds, draft_seconds)
        if rate > best:
            best, chosen = rate, within[:taken]
    counts = [0] * len(rates)
    for _, _, request in chosen:
        counts[request] += 1
    return counts, best * plain / len(rates) if chosen else 1.0


def _gains(rates: Sequence[Sequence[float]]) -> list[_Gain]:
    """Every draft worth considering."""
    found = []
    for request, chances in enumerate(rates):
        gain = 1.0
        for level, chance in enumerate(chances, start=1):
            gain *= chance
            if gain < _LEAST_GAIN:
                break
            found.append((gain, -level, request))
    return found


def _best_prefix(
    gains: Sequence[_Gain],
    num_requests: int,
    step_seconds: Callable[[int], float],
    draft_seconds: Callable[[int], float],
) -> tuple[float, int]:
    """The most tokens per second by taking the first drafts only, and how many."""
    best, taken, tokens, drafting = 0.0, 0, float(num_requests), 0.0
    levels = [0] * (max((-level for _, level, _ in gains), default=0) + 1)
    for count, (gain, level, _) in enumerate(gains, start=1):
        tokens += gain
        if levels[level]:
            drafting -= draft_seconds(levels[level])
        levels[level] += 1
        drafting += draft_seconds(levels[level])
        rate = tokens / (step_seconds(num_requests + count) + drafting)
        if rate > best:
            best, taken = rate, count
    return best, taken
