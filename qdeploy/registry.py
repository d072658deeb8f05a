"""One registry for every seam: methods, formats, executors, architectures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from qdeploy.errors import UsageError

T = TypeVar("T")


class Registry(Generic[T]):
    """Names to values; a duplicate name is a bug, an unknown one is the user's error."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def add(self, name: str, value: T) -> T:
        """Register `value`; raises ValueError when `name` is taken."""
        if name in self._entries:
            raise ValueError(f"{self.kind} {name!r} is registered twice")
        self._entries[name] = value
        return value

    def get(self, name: str) -> T:
        """Return the entry, or raise UsageError that lists the known names."""
        if name not in self._entries:
            raise UsageError(f"unknown {self.kind} {name!r}; choose one of {', '.join(self)}")
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries
