"""Rows of a Hugging Face dataset, by name or of a local folder; needs the package `datasets`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

from qdeploy.calibration.rows import KEYS
from qdeploy.errors import CalibrationError, SourceError, UsageError

#: NAME[:SPLIT][:COLUMN]; NAME is org/dataset, perhaps with a configuration: org/dataset/config.
_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*){0,2}(:[\w.-]*){0,2}")
#: Rows that are read of a data set: enough to choose from, few enough to stream.
ROWS_PER_SAMPLE = 16
MIN_ROWS = 1024
#: Since this version, data sets can't bring code of their own.
OLDEST = 4


def is_dataset_name(source: str) -> bool:
    """Whether a source may name a data set; paths that exist are local ones."""
    name = source.split(":")[0]
    return (name != "" and Path(name).is_dir()) or _NAME.fullmatch(source) is not None


def dataset_rows(source: str, samples: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The first rows of NAME[:SPLIT][:COLUMN], split train unless given, with their places.

    Streamed: only as much is fetched as is read. Raises UsageError without the package, SourceError
    when the data set can't be had, CalibrationError for a column that it hasn't got.
    """
    name, split, column = (*source.split(":"), "", "")[:3]
    package = _package(source)
    count = max(ROWS_PER_SAMPLE * samples, MIN_ROWS)
    try:
        rows = list(islice(_stream(package, name, split or "train"), count))
    except Exception as error:  # loaders of every file format and of the network raise their own
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise SourceError(
            f"calibration data set {source}: {reason}; check name, split and network, or give "
            "--calib default, self or a .jsonl file"
        ) from error
    for number, row in enumerate(rows):
        yield f"{name}, row {number}", _pick(row, column, source)


def _package(source: str) -> ModuleType:
    try:
        import datasets
    except ImportError:
        raise UsageError(
            f"calibration source {source!r} is no file; for a data set of that name, "
            "pip install 'qdeploy[datasets]', or give default, self, a .jsonl or a .txt file",
            param="calib",
        ) from None
    version = str(datasets.__version__)
    if int(version.split(".")[0]) < OLDEST:
        raise UsageError(
            f"datasets {version} may run code of a data set; pip install 'datasets>={OLDEST}'",
            param="calib",
        )
    module: ModuleType = datasets
    return module


def _stream(package: ModuleType, name: str, split: str) -> Any:
    parts = name.split("/")
    if len(parts) == 3 and not Path(name).exists():
        return package.load_dataset("/".join(parts[:2]), parts[2], split=split, streaming=True)
    return package.load_dataset(name, split=split, streaming=True)


def _pick(row: Mapping[str, Any], column: str, source: str) -> Mapping[str, Any]:
    """The row as one of a .jsonl file; a column is text, or a conversation if it is a list."""
    if column and column in row:
        value = row[column]
        return {"messages" if isinstance(value, list) else "text": value}
    if column or not any(key in row for key in KEYS):
        missing = f"no column {column!r}" if column else 'none of the columns "messages", "text"'
        raise CalibrationError(
            f"calibration data set {source}: {missing}; its columns are {', '.join(row)}; "
            "name one as NAME:SPLIT:COLUMN"
        )
    return row
