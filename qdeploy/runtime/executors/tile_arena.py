"""The file of packed tiles: a prologue, 64-byte aligned arrays, and an index in JSON at the end.

Prologue: 8 bytes of magic, the index's offset and length (u64, little-endian), the sha256 of all
that follows it; 64 bytes with its padding. The index comes last because what packing gives is
known only once it is done, and is never held in memory. A file that was cut has an index that
doesn't end where the file does.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from qdeploy_kernels.cpu.abi import Kind
from qdeploy_kernels.cpu.tiles import ALIGNMENT, TILE_ROWS, TileMatrix, tile_bytes

_THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MAGIC = b"qdtiles2"
_PROLOGUE = struct.Struct("<8sQQ32s8x")
_DTYPES = {"uint8": np.uint8, "float32": np.float32, "int32": np.int32}


class ArenaError(Exception):
    """A file that can't be used as an arena; the message says why, without the file's name."""


class ArenaWriter:
    """Writes arrays to a stream as they come; `finish` makes the file valid."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._arrays: dict[str, dict[str, Any]] = {}
        self._matrices: dict[str, dict[str, Any]] = {}
        self._digest = hashlib.sha256()
        self._offset = _PROLOGUE.size
        stream.write(bytes(_PROLOGUE.size))

    def add(self, name: str, array: NDArray[Any]) -> None:
        """Append an array of uint8, int32 or float32."""
        array = np.ascontiguousarray(array)
        self._arrays[name] = {
            "dtype": array.dtype.name,
            "shape": list(array.shape),
            "offset": self._offset,
        }
        self._write(array.reshape(-1).view(np.uint8).data)
        self._write(bytes(-array.nbytes % ALIGNMENT))

    def add_matrix(self, name: str, matrix: TileMatrix) -> None:
        """Append a packed matrix as up to three arrays."""
        self._matrices[name] = {
            "kind": int(matrix.kind),
            "rows": matrix.rows,
            "cols": matrix.cols,
            "group": matrix.group,
            "symmetric": matrix.symmetric,
        }
        self.add(f"{name}.tiles", matrix.tiles)
        if matrix.bias is not None:
            self.add(f"{name}.bias", matrix.bias)
        if matrix.permutation is not None:
            self.add(f"{name}.permutation", matrix.permutation)

    def finish(self, key: str) -> None:
        """Write the index and the prologue; the stream stays open."""
        index = {
            "key": key,
            "arrays": self._arrays,
            "matrices": self._matrices,
        }
        text, offset = json.dumps(index).encode(), self._offset
        self._write(text)
        self._stream.seek(0)
        self._stream.write(_PROLOGUE.pack(_MAGIC, offset, len(text), self._digest.digest()))
        self._stream.flush()

    def _write(self, data: bytes | memoryview) -> None:
        self._stream.write(data)
        self._digest.update(data)
        self._offset += len(data)


class Arena:
    """A mapped arena, read-only. Its arrays are views of the mapping and keep it alive."""

    def __init__(self, stream: BinaryIO, key: str) -> None:
        """Raises ArenaError unless the file is whole, of this version and of this key."""
        size = stream.seek(0, 2)
        if size < _PROLOGUE.size:
            raise ArenaError("truncated")
        self._map = _in_huge_pages(stream, size)
        magic, self._end, length, digest = _PROLOGUE.unpack_from(self._map)
        if magic != _MAGIC:
            raise ArenaError("not a tile file of this version")
        if self._end + length != size:
            raise ArenaError("truncated")
        index = _index(self._map[self._end : size])
        if index["key"] != key:
            raise ArenaError("it belongs to other weights")
        self.sha256: str = digest.hex()
        self._arrays: Mapping[str, Any] = index["arrays"]
        self._matrices: Mapping[str, Any] = index["matrices"]

    def data_sha256(self) -> str:
        """Hex sha256 of what follows the prologue, as it is now; reads every byte."""
        with memoryview(self._map) as view, view[_PROLOGUE.size :] as data:
            return hashlib.sha256(data).hexdigest()

    def has(self, name: str) -> bool:
        """Whether there is an array or matrix of that name."""
        return name in self._arrays or name in self._matrices

    def array(self, name: str, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
        """An array that must have this dtype and shape; ArenaError otherwise."""
        entry = self._arrays.get(name)
        if not isinstance(entry, dict):
            raise ArenaError(f"{name} is missing")
        if (entry.get("dtype"), entry.get("shape")) != (dtype, list(shape)):
            raise ArenaError(f"{name} has another dtype or shape than the model")
        offset, count, item = entry.get("offset"), prod(shape), np.dtype(_DTYPES[dtype])
        if not isinstance(offset, int) or offset < _PROLOGUE.size or offset % ALIGNMENT:
            raise ArenaError(f"{name} has no place in the file")
        if offset + count * item.itemsize > self._end:
            raise ArenaError(f"{name} lies outside the file")
        return np.frombuffer(self._map, item, count, offset).reshape(shape)

    def matrix(self, name: str, rows: int, cols: int) -> TileMatrix:
        """A matrix that must have this shape; ArenaError when anything about it is off."""
        entry = self._matrices.get(name)
        if not isinstance(entry, dict) or (entry.get("rows"), entry.get("cols")) != (rows, cols):
            raise ArenaError(f"{name} is missing or of another shape than the model's")
        kind, group, symmetric = _layout(name, entry)
        num_tiles = -(-rows // TILE_ROWS)
        size = tile_bytes(kind, cols, group, symmetric)
        return TileMatrix(
            kind=kind,
            rows=rows,
            cols=cols,
            group=group,
            symmetric=symmetric,
            tiles=self.array(f"{name}.tiles", "uint8", (num_tiles, size)),
            bias=self._optional(f"{name}.bias", "float32", num_tiles * TILE_ROWS),
            permutation=self._permutation(f"{name}.permutation", cols),
        )

    def _optional(self, name: str, dtype: str, size: int) -> NDArray[Any] | None:
        return self.array(name, dtype, (size,)) if name in self._arrays else None

    def _permutation(self, name: str, cols: int) -> NDArray[np.int32] | None:
        """Checked, since kernels read memory through it."""
        order = self._optional(name, "int32", cols)
        if order is not None and not np.array_equal(np.sort(order), np.arange(cols)):
            raise ArenaError(f"{name} is not a permutation")
        return order


class Tiles(Protocol):
    """What a model is made of; see Arena."""

    def has(self, name: str) -> bool: ...

    def array(self, name: str, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]: ...

    def matrix(self, name: str, rows: int, cols: int) -> TileMatrix: ...


def open_arena(path: Path, key: str) -> Arena:
    """Map a file; raises ArenaError as Arena does, OSError when it can't be read."""
    with path.open("rb") as stream:
        return Arena(stream, key)


def _in_huge_pages(stream: BinaryIO, size: int) -> mmap.mmap:
    """The whole file in private memory of huge pages, or mapped where the system has none.

    With pages of 4 KiB, address translation halves what two threads read per second.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE") or not _huge_pages():
        return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # no room for a copy; a mapping needs none
        return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    memory.madvise(mmap.MADV_HUGEPAGE)
    stream.seek(0)
    with memoryview(memory) as view:
        stream.readinto(view)  # type: ignore[attr-defined]
    return memory


def _huge_pages() -> bool:
    """Whether the system gives huge pages to those who ask."""
    try:
        return "[never]" not in _THP.read_text()
    except OSError:
        return False


def _index(text: bytes) -> dict[str, Any]:
    try:
        index = json.loads(text)
    except (ValueError, RecursionError):  # deep nesting is the latter
        raise ArenaError("its index is broken") from None
    kinds = {"key": str, "arrays": dict, "matrices": dict}
    if not isinstance(index, dict) or any(type(index.get(k)) is not t for k, t in kinds.items()):
        raise ArenaError("its index is broken")
    return index


def _layout(name: str, entry: Mapping[str, Any]) -> tuple[Kind, int, bool]:
    kind, group, symmetric = entry.get("kind"), entry.get("group"), entry.get("symmetric")
    if kind not in tuple(Kind) or not isinstance(group, int) or not isinstance(symmetric, bool):
        raise ArenaError(f"{name} has an unknown layout")
    quantized = kind in (Kind.W4, Kind.W8)
    runs = kind == Kind.FP8 and (group < 1 or (group % 4 and group != entry["cols"]))
    if runs or (quantized and (group < 8 or group % 8 or entry["cols"] % group)):
        raise ArenaError(f"{name} has a group that doesn't fit")
    return Kind(kind), group, symmetric
