"""What sealing means, one group at a time and in scalar arithmetic: shares no code with kivi.py."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


def seal_group(group: Floats, bits: int) -> Floats:
    """Quantize one group and back. The format's definition is in float32, so bits are exact."""
    one = np.float32
    low, high = one(min(group)), one(max(group))
    minimum = one(np.float16(low - abs(low) * one(2**-11)))
    scale = (high - minimum) / one(2**bits - 1) * one(1 + 2**-11) + one(2**-25)
    scale = one(np.float16(max(scale, one(2**-24))))
    codes = [min(max(np.round((one(x) - minimum) / scale), 0), 2**bits - 1) for x in group]
    return np.array([one(code) * scale + minimum for code in codes], dtype=np.float32)
