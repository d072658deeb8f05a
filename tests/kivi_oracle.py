"""What sealing means, one group at a time and in scalar arithmetic: shares no code with kivi.py."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

#: The magnitudes that a float8 E4M3 code has, by code: 3 bits of mantissa, exponents −6 … 8;
#: code 127 is NaN.
E4M3 = [
    (code % 8) * 2.0**-9 if code < 8 else (1 + code % 8 / 8) * 2.0 ** (code // 8 - 7)
    for code in range(127)
]


def e4m3(value: float) -> float:
    """The nearest value of a code; of two as near, the one with an even code."""
    code = min(range(127), key=lambda c: (abs(E4M3[c] - abs(value)), c % 2))
    return math.copysign(E4M3[code], value)


def seal_group_e4m3(group: Floats) -> Floats:
    """Quantize one group to float8 and back."""
    one = np.float32
    scale = one(max(abs(group))) / one(448) * one(1 + 2**-11) + one(2**-25)
    scale = one(np.float16(max(scale, one(2**-24))))
    return np.array([one(e4m3(float(one(x) / scale))) * scale for x in group], dtype=np.float32)


def seal_group(group: Floats, bits: int) -> Floats:
    """Quantize one group and back. The format's definition is in float32, so bits are exact."""
    one = np.float32
    low, high = one(min(group)), one(max(group))
    minimum = one(np.float16(low - abs(low) * one(2**-11)))
    scale = (high - minimum) / one(2**bits - 1) * one(1 + 2**-11) + one(2**-25)
    scale = one(np.float16(max(scale, one(2**-24))))
    codes = [min(max(np.round((one(x) - minimum) / scale), 0), 2**bits - 1) for x in group]
    return np.array([one(code) * scale + minimum for code in codes], dtype=np.float32)
