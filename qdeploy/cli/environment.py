"""The one place where the command sets environment variables: before torch is imported."""

from __future__ import annotations

import os


def bound_spinning() -> None:
    """Let OpenMP's idle threads sleep after a short spin, unless the user has a wish of his own.

    libgomp spins at barriers for milliseconds by default. Where a neighbour holds a core (another
    process, the HTTP thread), each barrier then waits a scheduler's quantum: scoring SmolLM2 on 2
    busy cores went from 60 to 200 tokens/s with this bound, and didn't slow down on quiet ones.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "20000")
