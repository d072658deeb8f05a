"""Passes over a whole row of logits: the CPU kernels', or NumPy's where they aren't built.

Both give the same tokens: what is compiled either compares only, or says how far it may be off, and
then NumPy has the last word.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from qdeploy.runtime.noise import may_exceed, token_noise
from qdeploy.runtime.scratch import scratch

if TYPE_CHECKING:
    from qdeploy_kernels.cpu.library import Library

logger = logging.getLogger(__name__)

Row = NDArray[np.float32]
Ids = NDArray[np.int64]

_REACH = 8.0  # in units of the temperature
_SMALLEST_FACTOR = 1e-30  # of 1 / temperature, so that it times −∞ is −∞


class RowPasses(Protocol):
    """scores [vocab], float32, some −∞ but none NaN or +∞; best: the maximum, or its id."""

    #: How far `mass` may be from `exact_mass`, as a share of it.
    mass_error: float

    def near(self, scores: Row, lowest: np.float32) -> Ids:
        """Ids, rising, of the scores that are at least `lowest`."""

    def mass(self, scores: Row, best: np.float32, temperature: float) -> float:
        """Sum of exp((score − best) / temperature)."""

    def contenders(self, scores: Row, best: int, key: int, temperature: float) -> Ids:
        """Ids, rising, of all tokens that could win argmax(score / temperature + noise), where
        `key` gives the noise, and some that can't.
        """


@cache
def row_passes() -> RowPasses:
    """The fastest that this installation has."""
    from qdeploy_kernels.cpu.library import CpuLibraryError, load_library

    try:
        return CompiledPasses(load_library())
    except CpuLibraryError as error:
        logger.info("tokens are sampled in NumPy: %s", error)
        return NumpyPasses()


def exact_mass(scores: Row, best: np.float32, temperature: float) -> float:
    """Sum of exp((score − best) / temperature) over scores [vocab], to about 10⁻⁶; the definition
    that decides.
    """
    scaled = scratch("scaled scores", scores.size, np.float32)
    np.subtract(scores, best, out=scaled)
    if temperature != 1:
        scaled *= np.float32(max(1 / temperature, _SMALLEST_FACTOR))
    return float(np.exp(scaled, out=scaled).sum())


class NumpyPasses:
    """Without compiled code."""

    mass_error = 0.0

    def near(self, scores: Row, lowest: np.float32) -> Ids:
        """As RowPasses."""
        return np.flatnonzero(scores >= lowest)

    def mass(self, scores: Row, best: np.float32, temperature: float) -> float:
        """As RowPasses."""
        return exact_mass(scores, best, temperature)

    def contenders(self, scores: Row, best: int, key: int, temperature: float) -> Ids:
        """As RowPasses. The best token's noise is a bound: others are no likelier, so they need as
        much, and those more than REACH · temperature below it need REACH more.
        """
        found = may_exceed(key, scores.size, token_noise(key, best) + _REACH)
        found |= scores >= floor(scores[best], _REACH * temperature)
        return np.flatnonzero(found)


class CompiledPasses:
    """By a library of CPU kernels."""

    def __init__(self, library: Library) -> None:
        self._library = library.cdll
        # NumPy's exponentials are faster than those of code for any CPU.
        self._sums = library.isa != "portable"
        self.mass_error = 4e-6 if self._sums else 0.0  # 1e-6 of it its own, the rest NumPy's

    def near(self, scores: Row, lowest: np.float32) -> Ids:
        """As RowPasses."""
        row, ids = _contiguous(scores), _room(scores)
        count = self._library.qd_near(row.ctypes.data, row.size, lowest, ids.ctypes.data)
        return ids[:count].astype(np.int64)

    def mass(self, scores: Row, best: np.float32, temperature: float) -> float:
        """As RowPasses."""
        if not self._sums:
            return exact_mass(scores, best, temperature)
        row, factor = _contiguous(scores), max(1 / temperature, _SMALLEST_FACTOR)
        return float(self._library.qd_mass(row.ctypes.data, row.size, best, factor))

    def contenders(self, scores: Row, best: int, key: int, temperature: float) -> Ids:
        """As RowPasses; hardly ever more than one, since the bound rises on the way."""
        row, ids = _contiguous(scores), _room(scores)
        count = self._library.qd_contenders(
            row.ctypes.data, row.size, best, temperature, key, ids.ctypes.data
        )
        return ids[:count].astype(np.int64)


def floor(best: np.float32, distance: float) -> np.float32:
    """best − distance, rounded down."""
    lowest: np.float32 = np.nextafter(np.float32(float(best) - distance), np.float32(-np.inf))
    return lowest


def _contiguous(scores: Row) -> Row:
    return np.ascontiguousarray(scores, np.float32)


def _room(scores: Row) -> NDArray[np.int32]:
    return scratch("ids of a pass", scores.size, np.int32)
