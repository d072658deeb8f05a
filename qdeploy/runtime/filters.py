"""Which tokens may be drawn: min_p, top_k and top_p, over scores that the temperature divides.

Only tokens near the best one are looked at one by one; each shortcut checks that no other token
could have changed the result.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from qdeploy.runtime.row_passes import Ids, Row, exact_mass, floor, row_passes
from qdeploy.runtime.sampling_params import SamplingParams

Scaled = NDArray[np.float64]

_NEVER = float("-inf")
#: How far below the best token, in units of the temperature, to look, until that is enough.
REACHES = (8.0, 11.0, 16.0, math.inf)
_SORTABLE = 1000  # of more tokens, sorting all takes longer than counting


def filter_tokens(scores: Row, best: np.float32, params: SamplingParams) -> tuple[Ids, Scaled]:
    """The ids [n] that the filters admit of scores [vocab], and (score − best) / temperature [n].

    best: the maximum of scores. top_p keeps the smallest set of most likely tokens whose
    probability, renormalized after the filters before it, reaches top_p. Tokens that tie with the
    last one kept all stay, so that the result doesn't depend on how a sort orders equals.
    """
    temperature = params.temperature
    limited = params.min_p > 0 or 0 < params.top_k < scores.size
    nucleus = None
    if params.top_p < 1:
        nucleus = _Nucleus(scores, best, params, whole=not limited)
    for reach in REACHES:
        ids = near(scores, best, reach * temperature)
        looked_at = scaled = scale(scores[ids], best, temperature)
        if limited:
            ids, scaled = _at_least(_limit(scaled, params), ids, scaled)
        # Once a filter drops a token near the best, the tokens beyond are out, too.
        dropped = len(scaled) < len(looked_at)
        if nucleus is not None and (not limited or dropped or reach == math.inf):
            ids, scaled = _at_least(nucleus.lowest(scaled), ids, scaled)
        if len(scaled) < len(looked_at):
            break
    return ids, scaled


def near(scores: Row, best: np.float32, distance: float) -> Ids:
    """Ids of scores [vocab] not further than `distance` below best, and perhaps a few more."""
    return row_passes().near(scores, floor(best, distance))


def scale(scores: Row, best: np.float32, temperature: float) -> Scaled:
    """(score − best) / temperature of scores [n]."""
    scaled: Scaled = (scores.astype(np.float64) - float(best)) / temperature
    return scaled


def _at_least(lowest: float, ids: Ids, scaled: Scaled) -> tuple[Ids, Scaled]:
    keep = scaled >= lowest
    return ids[keep], scaled[keep]


def _limit(scaled: Scaled, params: SamplingParams) -> float:
    """The lowest of scaled [n] that min_p and then top_k admit; n ≤ top_k limits nothing."""
    lowest = math.log(params.min_p) if params.min_p > 0 else _NEVER
    if 0 < params.top_k < scaled.size:
        lowest = max(lowest, float(np.partition(scaled, -params.top_k)[-params.top_k]))
    return lowest


class _Nucleus:
    """The lowest score that top_p keeps. whole: top_p is a share of all scores' mass, not of the
    mass of those that other filters left.
    """

    def __init__(
        self, scores: Row, best: np.float32, params: SamplingParams, *, whole: bool
    ) -> None:
        self._row = scores, best, params.temperature
        self._top_p = params.top_p
        self._mass: float | None = None
        self._error = 0.0
        if whole:
            passes = row_passes()
            self._mass, self._error = passes.mass(*self._row), passes.mass_error

    def lowest(self, scaled: Scaled) -> float:
        """Of scaled [n]: all scores, or those near the best; −∞ if these don't reach top_p."""
        found = top_p_threshold(scaled, self._top_p, self._mass, self._error)
        if found is None:  # too close to call
            self._mass, self._error = exact_mass(*self._row), 0.0
            found = top_p_threshold(scaled, self._top_p, self._mass, 0.0)
            assert found is not None
        return found


def top_p_threshold(scaled: Scaled, top_p: float, mass: float | None, error: float) -> float | None:
    """The lowest of scaled [n] that top_p keeps. mass: of all tokens, None if these are all; off by
    no more than the share `error` of it. None: it depends on that error.
    """
    probs = np.exp(scaled)
    reached = float(probs.sum())
    wanted = top_p * (reached if mass is None else mass)
    unsure = error * wanted
    if reached < wanted - unsure:
        return _NEVER
    if error and reached <= wanted + unsure:
        return None
    if scaled.size > _SORTABLE:  # sort only the tokens around the cut
        bins = np.minimum(scaled * -64, 2048).astype(np.int64)
        above = np.bincount(bins, weights=probs).cumsum()
        if error and np.abs(above - wanted).min() <= unsure:
            return None
        cut = min(int(np.searchsorted(above, wanted)), above.size - 1)
        wanted -= above[cut - 1] if cut else 0.0
        scaled = scaled[bins == cut]
    ranked = np.sort(scaled)
    probs = np.exp(ranked)[::-1]
    before = probs.cumsum() - probs
    if error and np.abs(before - wanted).min() <= unsure:
        return None
    return float(ranked[-np.count_nonzero(before < wanted)])
