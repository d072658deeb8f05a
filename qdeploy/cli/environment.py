"""The one place where the command sets environment variables: before torch is imported."""

from __future__ import annotations

import os


def bound_spinning() -> None:
    """Let OpenMP's idle threads sleep after a short spin, unless the user has a wish of his own.

    libgomp spins at barriers for milliseconds by default. Where a neighbour holds a core (another
    process, the HTTP thread), each barrier then waits a scheduler's quantum, and two threads are
    slower than one.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "20000")
