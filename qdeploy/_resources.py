"""Finds recipes and calibration data, in a checkout as in an installed wheel."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def resource_dir(kind: str) -> Path:
    """Folder `recipes` or `calib_data`: beside the package in a checkout, inside it in a wheel."""
    shipped = _PACKAGE / kind
    return shipped if shipped.is_dir() else _PACKAGE.parent / kind
