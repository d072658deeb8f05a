"""A Hugging Face model folder read lazily: `config.json` plus safetensors, headers checked first.

Nothing is mapped before its header passed `safetensors_header.read_header`, nothing is ever
unpickled, and no path leaves the folder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from qdeploy.errors import FormatError
from qdeploy.formats.safetensors_header import Entry, read_header, read_json

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
HASH_CHUNK_BYTES = 1 << 24
#: Folder in a model folder for what is derived from it and can be made again; no part of the model.
COMPILED = "compiled"


class TensorFolder:
    """Tensors and config of one model folder; validated when opened, read on demand."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.config: dict[str, Any] = read_json(inside(self.path, "config.json"))
        self.metadata: dict[str, str] = {}
        self._files: dict[str, Path] = {}
        self._entries: dict[str, Entry] = {}
        self._handles: dict[Path, Any] = {}
        self._sha256: str | None = None
        for file in _weight_files(self.path):
            self._add(file)
        self._names = frozenset(self._entries)
        self._check_index()

    def names(self) -> frozenset[str]:
        """Names of all stored tensors."""
        return self._names

    def tensor(self, name: str) -> Tensor:
        """The tensor as stored, read now; raises FormatError when the folder lacks it."""
        entry = self._entry(name)
        file = self._files[name]
        if file not in self._handles:
            self._handles[file] = safe_open(str(file), framework="pt", device="cpu")
        tensor: Tensor = self._handles[file].get_tensor(name)
        if tensor.shape != torch.Size(entry.shape):
            raise FormatError(f"{file}: {name} changed on disk while it was read; try again")
        return tensor

    def release(self) -> None:
        """Unmap the files, as soon as no tensor read from them is left; reading maps them anew."""
        self._handles.clear()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape from the header; reads no data."""
        return self._entry(name).shape

    def num_weights(self) -> int:
        """Numbers in all stored tensors, from the headers."""
        return sum(prod(entry.shape) for entry in self._entries.values())

    def dtype(self, name: str) -> torch.dtype:
        """Stored dtype from the header; reads no data."""
        return self._entry(name).dtype

    def files(self) -> list[Path]:
        """The safetensors files that hold the tensors, sorted."""
        return sorted(set(self._files.values()))

    def weights_sha256(self) -> str:
        """Hex sha256 over (name, dtype, shape, bytes) in name order.

        It doesn't depend on the sharding or on metadata, so a resharded copy is the same model.
        Reads every byte once and remembers the answer.
        """
        if self._sha256 is None:
            digest = hashlib.sha256()
            for name in sorted(self._entries):
                entry = self._entries[name]
                digest.update(f"{name}\0{entry.dtype}\0{list(entry.shape)}\0".encode())
                _hash_range(digest, self._files[name], entry)
            self._sha256 = digest.hexdigest()
        return self._sha256

    def _entry(self, name: str) -> Entry:
        if name not in self._entries:
            raise FormatError(f"{self.path}: no tensor {name!r} (it has {len(self._entries)})")
        return self._entries[name]

    def _add(self, file: Path) -> None:
        header = read_header(file)
        for name, entry in header.entries.items():
            if name in self._files:
                first = self._files[name].name
                raise FormatError(f"{self.path}: {name!r} is in both {first} and {file.name}")
            self._files[name] = file
            self._entries[name] = entry
        self.metadata.update(header.metadata)

    def _check_index(self) -> None:
        if (self.path / SINGLE_NAME).exists() or not (self.path / INDEX_NAME).exists():
            return
        weight_map = _weight_map(self.path)
        for name in sorted(set(weight_map) | set(self._files)):
            if name not in weight_map:
                raise FormatError(
                    f"{self._files[name]}: {name!r} is missing from {INDEX_NAME}; "
                    "save the model again so that both agree"
                )
            found = self._files.get(name)
            if found is None or found.name != Path(weight_map[name]).name:
                raise FormatError(
                    f"{self.path / INDEX_NAME}: {name!r} is not in {weight_map[name]}; "
                    "fetch the model again"
                )


def open_folder(path: Path | str) -> TensorFolder:
    """Open a model folder; raises FormatError with one line when it's broken or not safetensors."""
    return TensorFolder(path)


def inside(folder: Path, name: str) -> Path:
    """`folder/name`, or FormatError when the path would leave the folder (.., absolute, symlink).

    The hub cache keeps `snapshots/REVISION/file` as links to `blobs/HASH`: those stay allowed.
    """
    relative = Path(name)
    path = folder / relative
    if relative.is_absolute() or ".." in relative.parts or "\\" in name or not name:
        raise FormatError(f"{folder}: file name {name!r} leaves the model folder; refusing to read")
    if not path.exists():
        raise FormatError(f"{folder}: {name} is missing; give a Hugging Face model folder")
    allowed = [folder.resolve()]
    if folder.resolve().parent.name == "snapshots":
        allowed.append(folder.resolve().parent.parent / "blobs")
    if not any(path.resolve().is_relative_to(root) for root in allowed):
        raise FormatError(f"{path}: the link leaves the model folder; replace it by the file")
    return path


def _weight_files(folder: Path) -> list[Path]:
    """As transformers does: the single file, else the index, else all safetensors there are."""
    if (folder / SINGLE_NAME).exists():
        return [inside(folder, SINGLE_NAME)]
    if (folder / INDEX_NAME).exists():
        return [inside(folder, name) for name in sorted(set(_weight_map(folder).values()))]
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if names:
        return [inside(folder, name) for name in names]
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLE_SUFFIXES)
    if pickles:
        raise FormatError(
            f"{folder}: only pickled weights ({pickles[0]}), which can run code; "
            "convert to safetensors first (load with transformers and save_pretrained)"
        )
    raise FormatError(f"{folder}: no .safetensors file; give a folder with safetensors weights")


def _weight_map(folder: Path) -> Mapping[str, str]:
    index = read_json(inside(folder, INDEX_NAME))
    weight_map = index.get("weight_map")
    valid = isinstance(weight_map, dict) and all(isinstance(v, str) for v in weight_map.values())
    if not valid or not weight_map:
        raise FormatError(f"{folder / INDEX_NAME}: no weight_map of names to files; save it again")
    assert isinstance(weight_map, dict)
    return weight_map


def _hash_range(digest: Any, file: Path, entry: Entry) -> None:
    with file.open("rb") as stream:
        stream.seek(entry.begin)
        left = entry.end - entry.begin
        while left > 0:
            chunk = stream.read(min(left, HASH_CHUNK_BYTES))
            if not chunk:
                raise FormatError(f"{file}: truncated while it was read; fetch it again")
            digest.update(chunk)
            left -= len(chunk)
