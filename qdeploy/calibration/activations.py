"""Inputs of decoder layers, one tensor a batch: in memory, or one file a batch.

Files are read anew each time and never stay mapped, so that what is resident is one batch. They
hold the very same bits: where activations lie changes no result.
"""

from __future__ import annotations

import itertools
import shutil
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import overload

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from qdeploy.errors import UsageError

_KEY = "hidden"


class StoredBatches(Sequence[Tensor]):
    """Batches in the files 00000.safetensors … of a folder, which goes when the object does.

    `keep` ends that: the files then belong to whoever called it.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self._count = folder, count
        self._cleanup = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)

    @classmethod
    def open(cls, folder: Path) -> StoredBatches:
        """Batches that `write_batches` wrote earlier; the folder stays."""
        found = cls(folder, len(list(folder.glob("*.safetensors"))))
        found._cleanup.detach()
        return found

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Tensor: ...

    @overload
    def __getitem__(self, index: slice) -> list[Tensor]: ...

    def __getitem__(self, index: int | slice) -> Tensor | list[Tensor]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._count))]
        if not -self._count <= index < self._count:
            raise IndexError(index)
        return _read(_file(self.folder, index % self._count))

    def keep(self, target: Path) -> None:
        """Move the files to `target`, where they stay."""
        self._cleanup.detach()
        self.folder.rename(target)
        self.folder = target


class Spill:
    """Makes StoredBatches in numbered folders of `root`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._numbers = itertools.count()

    def __call__(self, batches: Iterable[Tensor]) -> StoredBatches:
        """Write batches as they come; at most one is in memory."""
        folder = self._root / f"spill-{next(self._numbers):05}"
        shutil.rmtree(folder, ignore_errors=True)  # of a killed run
        return StoredBatches(folder, write_batches(folder, batches))


def write_batches(folder: Path, batches: Iterable[Tensor]) -> int:
    """Write one file a batch into a new folder; returns how many."""
    folder.mkdir(parents=True)
    count = 0
    for count, batch in enumerate(batches, start=1):
        save_file({_KEY: batch.contiguous()}, str(_file(folder, count - 1)))
    return count


def _file(folder: Path, index: int) -> Path:
    return folder / f"{index:05}.safetensors"


def _read(path: Path) -> Tensor:
    try:
        with safe_open(str(path), framework="pt") as file:
            tensor: Tensor = file.get_tensor(_KEY)
            # A copy: kernels round otherwise at another alignment, and the mapping ends here.
            return tensor.clone()
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{path}: {error}; start over with --no-resume") from None
