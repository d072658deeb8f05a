"""Tensors streamed into safetensors shards: at most one shard is in memory."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from qdeploy.formats.hf import INDEX_NAME, SINGLE_NAME

_COPY_BYTES = 1 << 22


class ShardWriter:
    """Writes `model*.safetensors` into a folder, each tensor exactly once."""

    def __init__(self, folder: Path, max_shard_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._parts: list[list[str]] = []  # tensor names of each part on disk
        self.names: set[str] = set()
        self.total_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a tensor; a name that was added before is a bug (A10), hence ValueError."""
        if name in self.names:
            raise ValueError(f"tensor {name!r} is written twice")
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > self._max_bytes:
            self._flush({})
        self.names.add(name)
        # A clone: a view would keep (and safetensors would refuse) the storage that it shares.
        self._pending[name] = tensor.detach().to("cpu").clone().contiguous()
        self._pending_bytes += size
        self.total_bytes += size

    def close(self, metadata: Mapping[str, str]) -> list[str]:
        """Write the rest, name the files, put `metadata` into all headers; returns the names.

        One shard is `model.safetensors`; more are numbered and get an index.
        """
        full = {"format": "pt"} | dict(metadata)
        finished = len(self._parts)
        self._flush(full)
        count = len(self._parts)
        names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        names = names if count > 1 else [SINGLE_NAME]
        for part, name in enumerate(names):
            if part < finished:
                # Flushed before the quantization config was known.
                _copy_with_metadata(self._part(part), self._folder / name, full)
                self._part(part).unlink()
            else:
                self._part(part).rename(self._folder / name)
        if count == 1:
            return names
        self._write_index(names)
        return [*names, INDEX_NAME]

    def _flush(self, metadata: dict[str, str]) -> None:
        if self._pending or not self._parts:
            part = self._part(len(self._parts))
            save_file(self._pending, str(part), metadata=metadata)
            # safetensors gives 0600 files; a server often runs as another user.
            part.chmod(self._folder.stat().st_mode & 0o666)
            self._parts.append(list(self._pending))
        self._pending, self._pending_bytes = {}, 0

    def _part(self, number: int) -> Path:
        return self._folder / f"part-{number:05}"

    def _write_index(self, names: list[str]) -> None:
        weight_map = {
            tensor: name for name, part in zip(names, self._parts, strict=True) for tensor in part
        }
        index = {
            "metadata": {"total_size": self.total_bytes},
            "weight_map": dict(sorted(weight_map.items())),
        }
        text = json.dumps(index, indent=2) + "\n"
        (self._folder / INDEX_NAME).write_text(text, encoding="utf-8")


def _copy_with_metadata(source: Path, target: Path, metadata: Mapping[str, str]) -> None:
    """Copy a safetensors file of ours with another `__metadata__`; data offsets are relative."""
    with source.open("rb") as reader, target.open("wb") as writer:
        (length,) = struct.unpack("<Q", reader.read(8))
        header = json.loads(reader.read(length)) | {"__metadata__": dict(metadata)}
        raw = json.dumps(header, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) % 8)  # keeps the data aligned, as safetensors itself does
        writer.write(struct.pack("<Q", len(raw)) + raw)
        shutil.copyfileobj(reader, writer, _COPY_BYTES)
