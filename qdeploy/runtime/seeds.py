"""Where the noise of a request comes from."""

from __future__ import annotations

import hashlib


def request_seed(seed: int | None, engine_seed: int, request_id: str) -> int:
    """The request's own seed modulo 2⁶⁴, or one derived from the engine's seed and its id."""
    if seed is not None:
        return seed & ((1 << 64) - 1)
    digest = hashlib.blake2b(f"{engine_seed}/{request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
