"""Open a GGUF file: metadata as plain Python values, tensors dequantized on demand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qdeploy.errors import FormatError
from qdeploy.formats.gguf_header import TensorInfo, read_gguf_header

# Rows are dequantized in slices of about this many weights, so that a 262144-row embedding
# costs its bfloat16 copy plus 64 MB, not several float32 copies.
SLICE_WEIGHTS = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFile:
    """`fields`: metadata by key; `tensors`: directory entries by GGUF name."""

    path: Path
    fields: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]

    @property
    def architecture(self) -> str:
        """`general.architecture`, also the prefix of the model's keys."""
        return str(self.require("general.architecture"))

    def require(self, key: str) -> Any:
        """A metadata value that must be there."""
        if key not in self.fields:
            raise FormatError(f"{self.path}: GGUF key {key!r} is missing; fetch another GGUF file")
        return self.fields[key]

    def model_value(self, key: str, default: Any = None) -> Any:
        """`ARCH.key`; without a default the key must be there. Per-layer lists must be constant."""
        full = f"{self.architecture}.{key}"
        value = self.require(full) if default is None else self.fields.get(full, default)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise FormatError(f"{self.path}: {full} differs by layer; use the safetensors")
            value = value[0]
        return shortest(value) if isinstance(value, float) else value

    def shape(self, name: str) -> tuple[int, ...]:
        """Row-major shape, e.g. [out_features, in_features]."""
        return self.tensors[name].shape

    def tensor(self, name: str) -> Iterator[Tensor]:
        """Yield the tensor in order as float32 slices of whole rows, [rows, ...] or [size]."""
        from gguf import quants

        info = self.tensors[name]
        width = info.shape[-1]
        raw = np.memmap(self.path, mode="r", offset=info.begin, shape=(info.end - info.begin,))
        rows = raw.reshape(-1, raw.size * width // prod(info.shape))
        step = max(1, SLICE_WEIGHTS // width)
        for start in range(0, len(rows), step):
            try:
                values = quants.dequantize(rows[start : start + step], info.kind)
            except NotImplementedError as error:
                raise FormatError(
                    f"{self.path}: {name} has quantization type {info.kind.name}, which can't be "
                    "read; use a Q4_0..Q8_0, Q2_K..Q6_K, F16, BF16 or F32 file"
                ) from error
            slice_ = torch.from_numpy(np.array(values, dtype=np.float32))
            yield (
                slice_.reshape(-1) if len(info.shape) == 1 else slice_.reshape(-1, *info.shape[1:])
            )


def open_gguf(path: Path) -> GgufFile:
    """Parse the header; raises FormatError for anything that isn't a whole, valid GGUF file."""
    header = read_gguf_header(path)
    return GgufFile(path=path, fields=header.fields, tensors=header.tensors)


def shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 9.99999974e-06 in a GGUF was 1e-05."""
    return float(str(np.float32(value)))
