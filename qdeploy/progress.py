"""How long work reports its progress without knowing who shows it (the CLI does, with rich)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Task(Protocol):
    """One running piece of work."""

    def advance(self, amount: float = 1, note: str = "") -> None:
        """Move on by `amount` of the total; `note` says what is being done now."""


class Progress(Protocol):
    """Shows tasks; `info` and `warn` are lines that stay."""

    def task(self, description: str, total: float) -> AbstractContextManager[Task]: ...

    def info(self, message: str) -> None: ...

    def warn(self, message: str) -> None: ...


class _SilentTask:
    def advance(self, amount: float = 1, note: str = "") -> None:
        pass


class Silent:
    """Shows nothing; keeps warnings for the caller."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    @contextmanager
    def task(self, description: str, total: float) -> Iterator[Task]:
        yield _SilentTask()

    def info(self, message: str) -> None:
        pass

    def warn(self, message: str) -> None:
        self.warnings.append(message)
