"""Sizes, as users type them, and what goes to stdout."""

from __future__ import annotations

import json
import math

import pytest

from qdeploy.cli.console import print_json
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


def test_json_on_stdout_has_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"metrics": {"kl": math.nan, "ppl": math.inf}, "layers": [{"loss": 1.5}, math.nan]})

    def refuse(name: str) -> None:
        raise AssertionError(name)

    found = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert found == {"metrics": {"kl": None, "ppl": None}, "layers": [{"loss": 1.5}, None]}
