"""Which tokens can win argmax(score / T + noise), so that hardly any noise is computed in full.

The best token's noise is a bound: others are no likelier, so they need as much noise, and those
more than REACH · T below it need REACH more. Both are looked up in the noise's bits without a
logarithm. The CPU kernels do it in one pass, and raise the bound as they go; NumPy does it where
they aren't built. They may find different losers, but never lose the winner.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from functools import cache

import numpy as np

from qdeploy.runtime.filters import Ids, Row, near
from qdeploy.runtime.noise import may_exceed, token_noise
from qdeploy.runtime.scratch import scratch

logger = logging.getLogger(__name__)

#: (scores [vocab], the best one's id, key of the noise, temperature) → ids, rising.
Contenders = Callable[[Row, int, int, float], Ids]

_REACH = 8.0


def contenders(scores: Row, best: int, key: int, temperature: float) -> Ids:
    """Ids, rising, of all tokens of scores [vocab] that could win; scores[best] is the maximum."""
    return _fastest()(scores, best, key, temperature)


@cache
def _fastest() -> Contenders:
    from qdeploy_kernels.cpu.library import CpuLibraryError, load_library

    try:
        return in_cpp(load_library().cdll)
    except CpuLibraryError as error:
        logger.info("tokens are sampled in NumPy: %s", error)
        return in_numpy


def in_cpp(library: ctypes.CDLL) -> Contenders:
    """By a library of CPU kernels."""
    function = library.qd_contenders

    def find(scores: Row, best: int, key: int, temperature: float) -> Ids:
        row = np.ascontiguousarray(scores, np.float32)
        ids = scratch("contenders", row.size, np.int32)
        count = function(row.ctypes.data, row.size, best, temperature, key, ids.ctypes.data)
        return ids[:count].astype(np.int64)

    return find


def in_numpy(scores: Row, best: int, key: int, temperature: float) -> Ids:
    """Without compiled code."""
    bound = token_noise(key, best)
    close = near(scores, scores[best], _REACH * temperature)
    found = may_exceed(key, scores.size, bound + _REACH)
    found[close] = True
    return np.flatnonzero(found)
