"""What every command shares: output modes, progress bars, errors."""

from __future__ import annotations

import errno
import json
import logging
import math
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from qdeploy.errors import QdeployError
from qdeploy.progress import Task

#: Progress and messages; stdout is for results only, so that it can be piped.
stderr = Console(stderr=True, highlight=False)
stdout = Console(highlight=False)

_verbosity = 0


def set_verbosity(level: int) -> None:
    """−1 quiet, 0 normal, 1 verbose (log lines), 2 with tracebacks."""
    global _verbosity
    _verbosity = level
    threshold = {-1: logging.ERROR, 0: logging.WARNING}.get(level, logging.INFO)
    logging.basicConfig(level=threshold, format="%(message)s", handlers=[_LogLines()], force=True)
    logging.getLogger("qdeploy").setLevel(min(threshold, logging.INFO) if level >= 0 else threshold)


class _LogLines(logging.Handler):
    """Log lines on stderr, above a progress bar instead of through it."""

    def emit(self, record: logging.LogRecord) -> None:
        stderr.print(self.format(record), markup=False, soft_wrap=True)


class _BarTask:
    def __init__(self, bar: Progress, description: str, total: float) -> None:
        self._bar = bar
        self._id = bar.add_task(description, total=total, note="")

    def advance(self, amount: float = 1, note: str = "") -> None:
        self._bar.update(self._id, advance=amount, note=note)


class RichProgress:
    """qdeploy.progress.Progress on stderr, with the time that is left."""

    @contextmanager
    def task(self, description: str, total: float) -> Iterator[Task]:
        """A bar that goes away when done; silent under --quiet."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        # A transient bar leaves nothing in a log file but empty lines.
        silent = _verbosity < 0 or not stderr.is_terminal
        with Progress(*columns, console=stderr, transient=True, disable=silent) as bar:
            yield _BarTask(bar, description, total)

    def info(self, message: str) -> None:
        """A line that stays, unless --quiet."""
        if _verbosity >= 0:
            stderr.print(message, markup=False, soft_wrap=True)

    def warn(self, message: str) -> None:
        """A warning is shown even under --quiet."""
        stderr.print(f"warning: {message}", style="yellow", markup=False, soft_wrap=True)


def print_json(data: Mapping[str, Any]) -> None:
    """One JSON object on stdout, nothing else. JSON has no NaN: it becomes null."""
    print(json.dumps(_finite(data), indent=2, default=str, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def run(command: Callable[[], None]) -> None:
    """Run a command's body: user errors become one line and their exit code, Ctrl-C 130.

    So do files that can't be read or written: a full disk, say, is no bug.
    """
    try:
        command()
    except QdeployError as error:
        _report(str(error))
        raise typer.Exit(error.exit_code) from None
    except OSError as error:
        if error.errno is None or error.errno == errno.EPIPE:
            raise
        _report(f"{error.filename or 'a file'}: {error.strerror}; check permissions and free space")
        raise typer.Exit(QdeployError.exit_code) from None
    except KeyboardInterrupt:
        _report("interrupted")
        raise typer.Exit(130) from None


def _report(message: str) -> None:
    if _verbosity >= 2:
        traceback.print_exc()
    stderr.print("error: " + " ".join(message.split()), style="red", markup=False, soft_wrap=True)
