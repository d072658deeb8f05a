"""Which tokens may be drawn: min_p, top_k and top_p, over scores that the temperature divides.

Only tokens near the best one are looked at one by one; each shortcut checks that no other token
could have changed the result.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from qdeploy.runtime.sampling_params import SamplingParams
from qdeploy.runtime.scratch import scratch

Row = NDArray[np.float32]
Ids = NDArray[np.int64]
Scaled = NDArray[np.float64]

_NEVER = float("-inf")
#: How far below the best token, in units of the temperature, to look first, next, and at last.
REACHES = (8.0, 16.0, math.inf)
_SORTABLE = 1000  # of more tokens, sorting all takes longer than counting


def filter_tokens(scores: Row, best: np.float32, params: SamplingParams) -> tuple[Ids, Scaled]:
    """The ids [n] that the filters admit of scores [vocab], and (score − best) / temperature [n].

    best: the maximum of scores. top_p keeps the smallest set of most likely tokens whose
    probability, renormalized after the filters before it, reaches top_p. Tokens that tie with the
    last one kept all stay, so that the result doesn't depend on how a sort orders equals.
    """
    temperature = params.temperature
    limited = params.min_p > 0 or 0 < params.top_k < scores.size
    whole = None if limited or params.top_p == 1 else mass(scores, best, temperature)
    for reach in REACHES:
        ids = near(scores, best, reach * temperature)
        looked_at = scaled = scale(scores[ids], best, temperature)
        if limited:
            ids, scaled = _at_least(_limit(scaled, params), ids, scaled)
        # Once a filter drops a token near the best, the tokens beyond are out, too.
        dropped = len(scaled) < len(looked_at)
        if params.top_p < 1 and (not limited or dropped or reach == math.inf):
            ids, scaled = _at_least(_top_p_threshold(scaled, params.top_p, whole), ids, scaled)
        if len(scaled) < len(looked_at):
            break
    return ids, scaled


def near(scores: Row, best: np.float32, distance: float) -> Ids:
    """Ids of scores [vocab] not further than `distance` below best, and perhaps a few more."""
    return np.flatnonzero(scores >= floor(best, distance))


def floor(best: np.float32, distance: float) -> np.float32:
    """best − distance, rounded down."""
    lowest: np.float32 = np.nextafter(np.float32(float(best) - distance), np.float32(_NEVER))
    return lowest


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


def mass(scores: Row, best: np.float32, temperature: float) -> float:
    """Sum of exp((score − best) / temperature) over scores [vocab], to about 10⁻⁶."""
    scaled = scratch("scaled scores", scores.size, np.float32)
    np.subtract(scores, best, out=scaled)
    if temperature != 1:
        scaled *= np.float32(1 / temperature)
    return float(np.exp(scaled, out=scaled).sum())


def _top_p_threshold(scaled: Scaled, top_p: float, whole: float | None) -> float:
    """The lowest of scaled [n] that top_p keeps. whole: all tokens' mass; None: these are all."""
    probs = np.exp(scaled)
    reached = float(probs.sum())
    wanted = top_p * (reached if whole is None else whole)
    if reached < wanted:
        return _NEVER
    if scaled.size > _SORTABLE:  # sort only the tokens around the cut
        bins = np.minimum(scaled * -64, 2048).astype(np.int64)
        above = np.bincount(bins, weights=probs).cumsum()
        cut = min(int(np.searchsorted(above, wanted)), above.size - 1)
        wanted -= above[cut - 1] if cut else 0.0
        scaled = scaled[bins == cut]
    ranked = np.sort(scaled)
    probs = np.exp(ranked)[::-1]
    before = probs.cumsum() - probs
    return float(ranked[-np.count_nonzero(before < wanted)])
