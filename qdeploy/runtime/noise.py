"""Counter-based Gumbel noise: a pure function of (seed, sample index, position, token id).

Construction: key = mix(mix(mix(seed) ^ index) ^ position) with SplitMix64's finalizer `mix`
(Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators"; constants of
Stafford's variant 13). The bits of token i are output i of a SplitMix64 generator seeded with key:
mix(key + (i + 1)·γ). Their top 52 bits k give u = (k + ½)·2⁻⁵² and the noise −log(−log u).
52 bits, so that the largest u, 1 − 2⁻⁵³, is a float64 below 1 and the noise is bounded.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB

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


def gumbel(key: int, token_ids: Tensor) -> Tensor:
    """Gumbel(0, 1) noise of token_ids [n], int64, under `key`. Returns [n], float64."""
    bits = _mix64_tensor((token_ids + 1) * _signed(_GAMMA) + _signed(key))
    uniform = (_shift(bits, 12).double() + 0.5) * 2.0**-52
    return -torch.log(-torch.log(uniform))


def _mix64_tensor(x: Tensor) -> Tensor:
    """`mix64` on int64 tensors: products wrap modulo 2⁶⁴, shifts are made logical."""
    x = (x ^ _shift(x, 30)) * _signed(_MIX1)
    x = (x ^ _shift(x, 27)) * _signed(_MIX2)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(x: int) -> int:
    x &= _MASK
    return x - (1 << 64) if x >> 63 else x
