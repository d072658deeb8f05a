"""Which scheme each packed linear of a checkpoint has: one for all, or by name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from qdeploy.errors import FormatError, UsageError
from qdeploy.quantization.scheme import QuantScheme


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSchemes:
    """A quantization config's rules: exact names come first, then patterns, then `default`.

    default: of every other linear, None where a config has none
    names: full module names; patterns: regular expressions that match from the start of a name,
        the first that matches wins
    """

    default: QuantScheme | None = None
    names: Mapping[str, QuantScheme] = field(default_factory=dict)
    patterns: tuple[tuple[re.Pattern[str], QuantScheme], ...] = ()

    def of(self, module: str) -> QuantScheme | None:
        """The scheme of a linear, None where no rule is for it."""
        if module in self.names:
            return self.names[module]
        for pattern, scheme in self.patterns:
            if pattern.match(module):
                return scheme
        return self.default

    @property
    def all(self) -> tuple[QuantScheme, ...]:
        """Every scheme once."""
        found = [*self.names.values(), *(scheme for _, scheme in self.patterns)]
        return distinct(found if self.default is None else [self.default, *found])


def distinct(schemes: Iterable[QuantScheme]) -> tuple[QuantScheme, ...]:
    """Every scheme once, the most frequent first."""
    counts: dict[QuantScheme, int] = {}
    for scheme in schemes:
        counts[scheme] = counts.get(scheme, 0) + 1
    return tuple(sorted(counts, key=lambda scheme: -counts[scheme]))


def schemes_name(schemes: Iterable[QuantScheme]) -> str:
    """`W4A16`, or of mixed precision `W4A16 + FP8_DYNAMIC`, the most frequent first."""
    return " + ".join(dict.fromkeys(scheme.name for scheme in distinct(schemes)))


def only_scheme(schemes: Iterable[QuantScheme], format_name: str) -> QuantScheme:
    """The scheme that all share; UsageError, naming a format that mixes, when they don't."""
    first, *others = distinct(schemes)
    if others:
        raise UsageError(
            f"format {format_name} holds one scheme for all layers, not "
            f"{schemes_name([first, *others])}; use --format compressed-tensors",
            param="format",
        )
    return first


def compiled(pattern: str, key: str) -> re.Pattern[str]:
    """A regular expression under `key` of a config; FormatError for one that isn't."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise FormatError(f"quantization config: {key} {pattern!r}: {error}") from None
