"""How many tokens to draft for each request: what gives the most tokens a second."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

#: Speculating must promise that much more than not speculating: predictions are noisy.
MARGIN = 1.02
_LEAST_GAIN = 0.01  # expected tokens below which a further draft isn't considered
_MAX_RATE = 0.995


@dataclass(slots=True)
class Acceptance:
    """A decaying estimate of how often a draft is accepted, given that those before it were.

    keep: what a verification leaves of older evidence.
    """

    accepted: float = 0.0
    tested: float = 0.0
    keep: float = 0.8

    def update(self, num_drafts: int, num_accepted: int) -> None:
        """num_accepted of num_drafts ≥ 1 agreed; what follows the first mismatch wasn't tested."""
        self.accepted = self.keep * self.accepted + num_accepted
        self.tested = self.keep * self.tested + min(num_accepted + 1, num_drafts)

    def rate(self, prior: float, weight: float) -> float:
        """The estimate, with `weight` tests at the rate `prior` added."""
        rate = (self.accepted + weight * prior) / (self.tested + weight)
        return min(rate, _MAX_RATE)


def best_counts(
    rates: Sequence[float],
    limits: Sequence[int],
    step_seconds: Callable[[int], float],
    draft_seconds: Callable[[int], float],
) -> tuple[list[int], float]:
    """Drafts for each request that maximize expected tokens per second, and the gain over none.

    rates [n]: acceptance of a draft of each request; limits [n]: the most drafts of each.
    step_seconds(tokens): of a step; draft_seconds(requests): of one more draft each for so many.
    Expected tokens of a request with k drafts: 1 + rate + … + rate^k (Leviathan et al. 2023, eq. 1).
    A further draft never is worth more than the one before it, so that the best m drafts over all
    requests are the m largest gains.
    """
    gains = sorted(_gains(rates, limits), reverse=True)
    counts, chosen, tokens, drafting = [0] * len(rates), 0, float(len(rates)), 0.0
    levels = [0] * (max(limits, default=0) + 1)
    plain = step_seconds(len(rates))
    if plain <= 0:  # nothing was measured yet
        return counts, 1.0
    best = plain_rate = tokens / plain
    for taken, (gain, level, _) in enumerate(gains, start=1):
        tokens += gain
        level = -level
        drafting -= draft_seconds(levels[level]) if levels[level] else 0.0
        levels[level] += 1
        drafting += draft_seconds(levels[level])
        rate = tokens / (step_seconds(len(rates) + taken) + drafting)
        if rate > best and rate > MARGIN * plain_rate:
            best, chosen = rate, taken
    for _, _, request in gains[:chosen]:
        counts[request] += 1
    return counts, best / plain_rate


def _gains(rates: Sequence[float], limits: Sequence[int]) -> list[tuple[float, int, int]]:
    """(expected tokens of a draft, −its level, request) of every draft worth considering."""
    found = []
    for request, (rate, limit) in enumerate(zip(rates, limits, strict=True)):
        gain = 1.0
        for level in range(1, limit + 1):
            gain *= rate
            if gain < _LEAST_GAIN:
                break
            found.append((gain, -level, request))
    return found
