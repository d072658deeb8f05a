"""The GGUF header (versions 2 and 3, little-endian), every length checked against the file.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The `gguf` package's reader
trusts the counts in the file (an array of 2^60 elements is looped over), so the header is parsed
here and the package is used for what it is best at, dequantization.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from qdeploy.errors import FormatError

SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
STRING, ARRAY = 8, 9
MAX_DIMS = 4
DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """`shape` is row-major; `begin` and `end` are byte positions in the file."""

    shape: tuple[int, ...]
    kind: Any
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """Metadata as Python values and the tensor directory, in file order."""

    fields: dict[str, Any]
    tensors: dict[str, TensorInfo]


def read_gguf_header(path: Path) -> GgufHeader:
    """Parse and check; raises FormatError with one line for anything that isn't a whole file."""
    try:
        with path.open("rb") as stream:
            magic = stream.read(4)
            if magic != b"GGUF":
                raise FormatError(f"{path}: not a GGUF file (it starts with {magic!r})")
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Cursor(path, data).header()
    except OSError as error:
        raise FormatError(f"{path}: can't be read ({error.strerror})") from error


class _Cursor:
    """Reads values one after the other; never past the end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.position = 4

    def header(self) -> GgufHeader:
        version = self.scalar("I")
        if version not in (2, 3):
            raise self.broken(f"version {version} isn't 2 or 3 (or the file is big-endian)")
        num_tensors, num_fields = self.scalar("Q"), self.scalar("Q")
        fields: dict[str, Any] = {}
        for _ in range(num_fields):
            key = self.string()
            if key in fields:
                raise self.broken(f"key {key!r} appears twice")
            fields[key] = self.value(self.scalar("I"))
        return GgufHeader(fields=fields, tensors=self.tensors(num_tensors, fields))

    def take(self, size: int) -> bytes:
        if size > len(self.data) - self.position:
            raise self.broken(f"{size} bytes at {self.position} pass the end ({len(self.data)})")
        self.position += size
        return self.data[self.position - size : self.position]

    def scalar(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def string(self) -> str:
        raw = self.take(self.scalar("Q"))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.broken(f"text before byte {self.position} isn't UTF-8") from error

    def value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self.scalar(SCALARS[kind])
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            raise self.broken(f"unknown value type {kind}")
        item, count = self.scalar("I"), self.scalar("Q")
        if item == STRING:
            return [self.string() for _ in range(count)]
        if item not in SCALARS:
            raise self.broken(f"unsupported array element type {item}")
        width = struct.calcsize(f"<{SCALARS[item]}")
        return list(struct.unpack(f"<{count}{SCALARS[item]}", self.take(count * width)))

    def tensors(self, count: int, fields: dict[str, Any]) -> dict[str, TensorInfo]:
        found: list[tuple[str, tuple[int, ...], int, int]] = []
        for _ in range(count):
            name = self.string()
            num_dims = self.scalar("I")
            if not 1 <= num_dims <= MAX_DIMS:
                raise self.broken(f"tensor {name!r} has {num_dims} dimensions")
            shape = tuple(self.scalar("Q") for _ in range(num_dims))[::-1]
            found.append((name, shape, self.scalar("I"), self.scalar("Q")))
        alignment = fields.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self.broken(f"general.alignment {alignment!r} isn't a power of two")
        start = -(-self.position // alignment) * alignment
        result: dict[str, TensorInfo] = {}
        position = start
        for name, shape, kind, offset in sorted(found, key=lambda item: item[3]):
            info = self.tensor(name, shape, kind, start + offset)
            if name in result or info.begin < position:
                raise self.broken(f"tensor {name!r} appears twice or overlaps another")
            result[name], position = info, info.end
        return result

    def tensor(self, name: str, shape: tuple[int, ...], kind: int, begin: int) -> TensorInfo:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            quantization = GGMLQuantizationType(kind)
        except ValueError as error:
            raise self.broken(f"tensor {name!r} has unknown type {kind}") from error
        block, size = GGML_QUANT_SIZES[quantization]
        if not all(shape) or shape[-1] % block:
            raise self.broken(f"tensor {name!r} of type {quantization.name} has shape {shape}")
        end = begin + prod(shape) // block * size
        if end > len(self.data):
            raise self.broken(f"tensor {name!r} ends at byte {end} of {len(self.data)}")
        return TensorInfo(shape=shape, kind=quantization, begin=begin, end=end)

    def broken(self, fault: str) -> FormatError:
        return FormatError(f"{self.path}: {fault[:200]}; the GGUF file is damaged, fetch it again")
