"""Backends that this checkout can test: without compiled kernels, the reference backend alone.

tests/cpu fails then, and says what to do.
"""

from __future__ import annotations

from qdeploy_kernels.cpu.library import available_isas

BACKENDS = ["cpu", "reference"] if available_isas() else ["reference"]
