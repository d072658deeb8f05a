"""The safetensors header, checked in full before any byte of data is mapped.

Layout: u64 little-endian header length N, N bytes of JSON `{name: {dtype, shape, data_offsets}}`
plus an optional `__metadata__` of strings, then the data, which the tensors tile without a gap.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from qdeploy.errors import FormatError

# The limit of the safetensors library itself.
MAX_HEADER_BYTES = 100_000_000
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor of a file; `begin` and `end` are byte positions in the file, not in the data."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """All entries of one file and its `__metadata__`."""

    entries: dict[str, Entry]
    metadata: dict[str, str]


def read_header(file: Path) -> Header:
    """Parse and check the header of `file`; raises FormatError naming the file and the fault."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            if len(prefix) < 8:
                raise _broken(file, f"{size} bytes are too few for a header")
            (length,) = struct.unpack("<Q", prefix)
            if length > min(MAX_HEADER_BYTES, size - 8):
                raise _broken(file, f"header length {length} exceeds the file of {size} bytes")
            raw = stream.read(length)
    except OSError as error:
        raise FormatError(f"{file}: can't be read ({error.strerror})") from error
    header = parse_json(raw, file)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _broken(file, "__metadata__ must map names to strings")
    start = 8 + length
    entries = {name: _entry(file, name, value, start) for name, value in header.items()}
    _check_tiling(file, entries, start, size)
    return Header(entries=entries, metadata=metadata)


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file; FormatError when it's unreadable, no object, or has duplicates."""
    try:
        return parse_json(file.read_bytes(), file)
    except OSError as error:
        raise FormatError(f"{file}: can't be read ({error.strerror})") from error


def parse_json(raw: bytes, file: Path) -> dict[str, Any]:
    """A JSON object from bytes of `file`; see `read_json`."""

    def unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result:
                raise _broken(file, f"{key!r} appears twice")
            result[key] = value
        return result

    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise _broken(file, f"not valid JSON ({str(error)[:80]})") from error
    if not isinstance(value, dict):
        raise _broken(file, "not a JSON object")
    return value


def _entry(file: Path, name: str, value: Any, start: int) -> Entry:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise _broken(file, f"{name!r} needs exactly dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise _broken(file, f"{name!r} has unknown dtype {dtype!r}")
    if not _naturals(shape):
        raise _broken(file, f"{name!r} has invalid shape {shape!r}")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _broken(file, f"{name!r} has invalid data_offsets {offsets!r}")
    # Python integers don't overflow, so a huge shape can't wrap around to the right size.
    needed = prod(shape) * DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != needed:
        raise _broken(file, f"{name!r} needs {needed} bytes but its offsets give another size")
    return Entry(
        dtype=DTYPES[dtype],
        shape=tuple(shape),
        begin=start + offsets[0],
        end=start + offsets[1],
    )


def _check_tiling(file: Path, entries: dict[str, Entry], start: int, size: int) -> None:
    position = start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position:
            fault = "overlaps another tensor" if entry.begin < position else "leaves a gap before"
            raise _broken(file, f"{name!r} {fault}")
        position = entry.end
        if position > size:
            raise _broken(file, f"{name!r} ends at byte {position} of a file of {size}")
    if position != size:
        raise _broken(file, f"{size - position} bytes after the last tensor")


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _broken(file: Path, fault: str) -> FormatError:
    return FormatError(f"{file}: {fault}; the file is damaged, fetch or save it again")
