"""Counter-based Gumbel noise: a pure function of (seed, sample index, position, token id).

Construction: key = mix(mix(mix(seed) ^ index) ^ position) with SplitMix64's finalizer `mix`
(Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators"; constants of
Stafford's variant 13). The bits of token i are output i of a SplitMix64 generator seeded with key:
mix(key + (i + 1)·γ). Their top 52 bits k give u = (k + ½)·2⁻⁵² and the noise −log(−log u).
52 bits, so that the largest u, 1 − 2⁻⁵³, is a float64 below 1 and the noise is bounded.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from qdeploy.runtime.scratch import scratch

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB
_SLACK = 1e-6  # more than the rounding of the noise and of its inverse

MAX_GUMBEL = 53 * math.log(2) + 1e-9
MIN_GUMBEL = -math.log(53 * math.log(2)) - 1e-9


def mix64(x: int) -> int:
    """SplitMix64's finalizer on one unsigned 64-bit integer."""
    x &= _MASK
    x = ((x ^ (x >> 30)) * _MIX1) & _MASK
    x = ((x ^ (x >> 27)) * _MIX2) & _MASK
    return x ^ (x >> 31)


def noise_key(seed: int, index: int, position: int) -> int:
    """The stream of one sampled position; unsigned 64 bits."""
    return mix64(mix64(mix64(seed) ^ index) ^ position)


def gumbel(key: int, token_ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Gumbel(0, 1) noise of token_ids [n] under `key`. Returns [n]."""
    bits = _unfinished_mix(key, (token_ids.astype(np.uint64) + np.uint64(1)) * np.uint64(_GAMMA))
    bits ^= bits >> np.uint64(31)
    uniform = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    noise: NDArray[np.float64] = -np.log(-np.log(uniform))
    return noise


def token_noise(key: int, token_id: int) -> float:
    """`gumbel` of one token, but for rounding."""
    bits = mix64(key + (token_id + 1) * _GAMMA) >> 12
    return -math.log(-math.log((bits + 0.5) * 2.0**-52))


def may_exceed(key: int, num_tokens: int, noise: float) -> NDArray[np.bool_]:
    """For tokens 0 … num_tokens − 1: False only where the noise is surely not above `noise`.

    Compares bits, since few tokens are worth two logarithms; the top 31 bits are enough, and
    `mix`'s last step leaves them as they are.
    """
    above = -math.expm1(-math.exp(_SLACK - noise))  # the probability of such noise
    lowest = max(0, (1 << 64) - math.ceil(above * 2**64)) >> 33 << 33
    if lowest == 0:
        return np.ones(num_tokens, dtype=np.bool_)
    lowest = min(lowest, (1 << 64) - (1 << 33))
    found: NDArray[np.bool_] = _unfinished_mix(key, _counters(num_tokens)) >= np.uint64(lowest)
    return found


@lru_cache(maxsize=4)
def _counters(num_tokens: int) -> NDArray[np.uint64]:
    """(i + 1)·γ modulo 2⁶⁴ for every token; read only."""
    counters = np.arange(1, num_tokens + 1, dtype=np.uint64)
    counters *= np.uint64(_GAMMA)
    return counters


def _unfinished_mix(key: int, counters: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`mix64` of key + counters [n] without its last shift, in a scratch buffer; products wrap
    modulo 2⁶⁴.
    """
    bits: NDArray[np.uint64] = scratch("noise bits", counters.size, np.uint64)
    shifted = scratch("shifted noise bits", counters.size, np.uint64)
    np.add(counters, np.uint64(key), out=bits)
    np.right_shift(bits, np.uint64(30), out=shifted)
    bits ^= shifted
    bits *= np.uint64(_MIX1)
    np.right_shift(bits, np.uint64(27), out=shifted)
    bits ^= shifted
    bits *= np.uint64(_MIX2)
    return bits
