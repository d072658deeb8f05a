"""Finds recipes and calibration data, in a checkout as in an installed wheel."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def resource_dir(kind: str) -> Path:
    """Folder `recipes` or `calib_data`: beside the package in a checkout, inside it in a wheel."""
    checkout = _PACKAGE.parent
    return (checkout if (checkout / "pyproject.toml").exists() else _PACKAGE) / kind
