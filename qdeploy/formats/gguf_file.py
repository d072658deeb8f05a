"""Open a GGUF file: metadata as plain Python values, tensors dequantized on demand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qdeploy.errors import FormatError

# Rows are dequantized in slices of about this many weights, so that a 262144-row embedding
# costs its bfloat16 copy plus 64 MB, not several float32 copies.
SLICE_WEIGHTS = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFile:
    """`fields`: metadata by key; `tensors`: the package's ReaderTensor by GGUF name."""

    path: Path
    fields: Mapping[str, Any]
    tensors: Mapping[str, Any]

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
                raise FormatError(
                    f"{self.path}: {full} differs by layer, which no decoder here has"
                )
            value = value[0]
        return shortest(value) if isinstance(value, float) else value

    def shape(self, name: str) -> tuple[int, ...]:
        """Row-major shape, e.g. [out_features, in_features]; GGUF itself lists it reversed."""
        return tuple(int(size) for size in reversed(self.tensors[name].shape))

    def tensor(self, name: str) -> Iterator[Tensor]:
        """Yield the tensor's rows in order as float32 slices; 1-D tensors come as one slice."""
        from gguf import quants

        stored = self.tensors[name]
        rows = max(1, SLICE_WEIGHTS // max(1, self.shape(name)[-1]))
        total = self.shape(name)[0]
        step = total if len(self.shape(name)) == 1 else rows
        for start in range(0, total, max(1, step)):
            try:
                values = quants.dequantize(stored.data[start : start + step], stored.tensor_type)
            except NotImplementedError as error:
                kind = stored.tensor_type.name
                raise FormatError(
                    f"{self.path}: {name} has quantization type {kind}, which can't be read; "
                    "use a Q4_0..Q8_0, Q2_K..Q6_K, F16, BF16 or F32 file"
                ) from error
            yield torch.from_numpy(np.array(values, dtype=np.float32))


def open_gguf(path: Path) -> GgufFile:
    """Parse the header; raises FormatError for anything that isn't a whole, valid GGUF file."""
    from gguf import GGUFReader

    try:
        with path.open("rb") as stream:
            magic = stream.read(4)
        if magic != b"GGUF":
            raise FormatError(f"{path}: not a GGUF file (it starts with {magic!r})")
        reader = GGUFReader(path)
        fields = {key: field.contents() for key, field in reader.fields.items()}
    except FormatError:
        raise
    except Exception as error:  # the parser fails in many ways on a damaged file
        reason = str(error).splitlines()[0][:100] if str(error) else type(error).__name__
        raise FormatError(f"{path}: damaged GGUF file ({reason}); fetch it again") from error
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    return GgufFile(path=path, fields=fields, tensors=tensors)


def shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 9.99999974e-06 in a GGUF was 1e-05."""
    return float(str(np.float32(value)))
