"""Buffers that a thread keeps: memory fresh from the system costs more than a pass over it."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

_local = threading.local()


def scratch(name: str, size: int, dtype: type[np.generic]) -> NDArray[Any]:
    """This thread's buffer `name` [size]; holds what was left in it, and is good until the next
    call with this name.
    """
    buffers: dict[str, NDArray[Any]] = _local.__dict__
    found = buffers.get(name)
    if found is None or found.size < size:
        found = buffers[name] = np.empty(size, dtype)
    return found[:size]
