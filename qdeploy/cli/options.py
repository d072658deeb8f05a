"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

from qdeploy.cli.console import set_verbosity
from qdeploy.errors import UsageError


def _verbose(count: int) -> int:
    if count:
        set_verbosity(count)
    return count


def _quiet(quiet: bool) -> bool:
    if quiet:
        set_verbosity(-1)
    return quiet


Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Verbose = Annotated[
    int,
    typer.Option("-v", "--verbose", count=True, callback=_verbose, help="More; -vv: tracebacks."),
]
Quiet = Annotated[
    bool, typer.Option("-q", "--quiet", callback=_quiet, help="Only results, warnings and errors.")
]
Artifact = Annotated[str, typer.Argument(metavar="ARTIFACT", help="Folder, .gguf, hub or pypi:.")]
Backend = Annotated[str, typer.Option(help="auto (the fastest that runs here), cpu or reference.")]
Act = Annotated[
    str | None,
    typer.Option(help="Activations: int8 (dynamic; cpu's default) or fp32 (exact)."),
]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads; default: all cores.")]

MaxShardSize = Annotated[str, typer.Option(help="Largest safetensors file.")]


def parse_size(text: str, option: str, *, allow_zero: bool = False) -> int:
    """Bytes from `2GiB`, `512MiB`, `40MB` or a plain number; UsageError names the option."""
    units = {"": 1, "B": 1}
    for power, letter in enumerate("KMGT", start=1):
        units |= {f"{letter}B": 1000**power, f"{letter}IB": 1024**power}
    number = text.strip().rstrip("BbIiKkMmGgTt")
    unit = text.strip()[len(number) :].upper()
    try:
        size = int(float(number) * units[unit])
    except (KeyError, ValueError, OverflowError):
        size = -1
    if size < 0 or (size == 0 and not allow_zero):
        raise UsageError(f"{option} {text!r} is not a size; write e.g. 2GiB or 512MiB")
    return size
