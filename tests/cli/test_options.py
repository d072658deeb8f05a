"""Sizes and verbosity, as users type them."""

from __future__ import annotations

import pytest

from qdeploy.cli.options import parse_size
from qdeploy.errors import UsageError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GiB", 2 << 30),
        ("512MiB", 512 << 20),
        ("40MB", 40_000_000),
        ("1.5kb", 1500),
        ("123", 123),
        ("7B", 7),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text, "--x") == size


@pytest.mark.parametrize("text", ["", "GiB", "2XB", "-1", "0", "two", "1e999", "nan"])
def test_bad_size_names_the_option(text: str) -> None:
    with pytest.raises(UsageError, match="--kv-cache-memory"):
        parse_size(text, "--kv-cache-memory")
