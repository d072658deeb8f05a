"""Tensors streamed into safetensors shards: none is held in memory.

A tensor's bytes go to a data file as they come; a shard is put together from it at the end, when
its header is known, the wider dtypes first, so that every tensor is aligned.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from qdeploy.errors import FormatError
from qdeploy.formats.hf import INDEX_NAME, SINGLE_NAME
from qdeploy.formats.safetensors_header import DTYPES

_COPY_BYTES = 1 << 22
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class _Piece:
    """A tensor's place in a data file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    size: int


class ShardWriter:
    """Writes `model*.safetensors` into a folder, each tensor exactly once."""

    def __init__(self, folder: Path, max_shard_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_shard_bytes
        self._parts: list[list[_Piece]] = [[]]
        self._stream: IO[bytes] | None = None
        self.names: set[str] = set()
        self.total_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Write a tensor; a name that was added before is a bug (A10), hence ValueError."""
        if name in self.names:
            raise ValueError(f"tensor {name!r} is written twice")
        data = tensor.detach().to("cpu").contiguous()
        size = data.numel() * data.element_size()
        if self._parts[-1] and self._part_bytes() + size > self._max_bytes:
            self._end_data()
            self._parts.append([])
        if self._stream is None:
            self._stream = self._data(len(self._parts) - 1).open("wb")
        begin = self._part_bytes()
        self._parts[-1].append(_Piece(name, data.dtype, tuple(data.shape), begin, size))
        if size:
            self._stream.write(data.reshape(-1).view(torch.uint8).numpy().data)
        self.names.add(name)
        self.total_bytes += size

    def close(self, metadata: Mapping[str, str]) -> list[str]:
        """Put the shards together, `metadata` in all headers; returns the files' names.

        One shard is `model.safetensors`; more are numbered and get an index.
        """
        self._end_data()
        count = len(self._parts)
        names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        names = names if count > 1 else [SINGLE_NAME]
        for number, name in enumerate(names):
            target = self._folder / name
            _assemble(self._parts[number], self._data(number), target, {"format": "pt", **metadata})
            # A server often runs as another user.
            target.chmod(self._folder.stat().st_mode & 0o666)
            self._data(number).unlink(missing_ok=True)
        if count == 1:
            return names
        self._write_index(names)
        return [*names, INDEX_NAME]

    def abandon(self) -> None:
        """Close the open file; what was written is of no use."""
        self._end_data()

    def _part_bytes(self) -> int:
        pieces = self._parts[-1]
        return pieces[-1].begin + pieces[-1].size if pieces else 0

    def _end_data(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _data(self, number: int) -> Path:
        return self._folder / f"part-{number:05}.data"

    def _write_index(self, names: list[str]) -> None:
        weight_map = {
            piece.name: name
            for name, pieces in zip(names, self._parts, strict=True)
            for piece in pieces
        }
        index = {
            "metadata": {"total_size": self.total_bytes},
            "weight_map": dict(sorted(weight_map.items())),
        }
        text = json.dumps(index, indent=2) + "\n"
        (self._folder / INDEX_NAME).write_text(text, encoding="utf-8")


def _assemble(pieces: list[_Piece], data: Path, target: Path, metadata: Mapping[str, str]) -> None:
    """A safetensors file of the pieces, ordered as the library orders them."""
    ordered = sorted(pieces, key=lambda piece: (-piece.dtype.itemsize, piece.name))
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for piece in ordered:
        header[piece.name] = {
            "dtype": _NAMES[piece.dtype],
            "shape": piece.shape,
            "data_offsets": (offset, offset + piece.size),
        }
        offset += piece.size
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)  # keeps the data aligned, as safetensors itself does
    with target.open("wb") as writer:
        writer.write(struct.pack("<Q", len(raw)) + raw)
        if offset:
            with data.open("rb") as reader:
                for piece in ordered:
                    _copy(reader, writer, piece)


def _copy(reader: IO[bytes], writer: IO[bytes], piece: _Piece) -> None:
    reader.seek(piece.begin)
    left = piece.size
    while left:
        chunk = reader.read(min(left, _COPY_BYTES))
        if not chunk:
            raise FormatError(f"{piece.name}: its data file ends early; check the disk")
        writer.write(chunk)
        left -= len(chunk)
