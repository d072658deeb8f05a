"""Errors that a user can cause. The CLI prints the message as one line and exits with `exit_code`.

QdeployError
├── UsageError          an option or a request that can't be honoured
├── SourceError         a model reference that can't be resolved or fetched
├── FormatError         a checkpoint or manifest that is broken or unknown
├── CalibrationError    calibration data or statistics that don't suffice
├── CapacityError       a request or configuration that doesn't fit in memory
└── GateError           an accuracy gate that failed (exit code 1)
"""

from __future__ import annotations


class QdeployError(Exception):
    """Base of all errors whose message names the thing, the value and the next step."""

    exit_code = 2


class UsageError(QdeployError):
    """An option, recipe key or request parameter that can't be honoured."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class SourceError(QdeployError):
    """A model reference that can't be resolved or fetched."""


class FormatError(QdeployError):
    """A checkpoint, artifact or manifest that is broken, incomplete or of an unknown kind."""


class CalibrationError(QdeployError):
    """Calibration data or statistics that don't suffice."""


class CapacityError(QdeployError):
    """A request or configuration that doesn't fit in the memory given."""


class GateError(QdeployError):
    """An accuracy gate that failed."""

    exit_code = 1
