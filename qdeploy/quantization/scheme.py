"""What a quantized linear layer is: the scheme (a value) and the codes (tensors)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from qdeploy.errors import UsageError

if TYPE_CHECKING:  # recipes import this file, and `qdeploy --help` must not wait for torch
    from torch import Tensor

Bits = Literal[2, 3, 4, 8]
#: What a code stands for: an unsigned integer, or a float8 (e4m3fn) by its bits.
Number = Literal["int", "e4m3"]
#: How other engines round the inputs of such a layer to 8 bits: per token as they come, or by a
#: scale in the checkpoint. Ours take the weights alone (docs/formats.md).
Activations = Literal["dynamic", "static"]
E4M3_MAX = 448
#: Rows and columns of an FP8_BLOCK block.
FP8_BLOCK = 128
#: What embedding and head can have: bits, and group sizes, the largest that divides first.
TABLE_BITS = (8, 4)
TABLE_GROUP_SIZES = (64, 32, 16, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantScheme:
    """How the weight of one linear layer is quantized.

    `group_size` counts input features; -1 is one group for the whole row. `block_rows` counts
    the rows that have their scales in common, -1 for all; integers have scales for each row.
    """

    bits: int = 4
    group_size: int = 64
    symmetric: bool = False
    act_order: bool = False
    number: Number = "int"
    block_rows: int = 1
    activations: Activations | None = None

    def __post_init__(self) -> None:
        if self.bits not in (2, 3, 4, 8):
            raise UsageError(f"bits={self.bits} is not supported; choose 2, 3, 4 or 8")
        if self.group_size != -1 and self.group_size < 8:
            raise UsageError(f"group_size={self.group_size} is not supported; choose -1 or ≥ 8")
        if self.number == "e4m3" and self.bits != 8:
            raise UsageError(f"bits={self.bits} is not possible for float8")

    @property
    def max_code(self) -> int:
        """The largest unsigned code, 2^bits − 1."""
        return (1 << self.bits) - 1

    @property
    def mid_code(self) -> int:
        """The code of zero under symmetric quantization, 2^(bits − 1)."""
        return 1 << (self.bits - 1)

    @property
    def max_value(self) -> int:
        """The largest magnitude that a scale is multiplied by."""
        return E4M3_MAX if self.number == "e4m3" else self.max_code

    def groups(self, in_features: int) -> int:
        """Number of groups in a row; raises UsageError when the group size doesn't divide it."""
        size = in_features if self.group_size == -1 else self.group_size
        if in_features % size:
            fits = [g for g in (256, 128, 96, 64, 32, 16) if in_features % g == 0]
            raise UsageError(
                f"group size {size} does not divide {in_features} input features; "
                f"group sizes that do: {', '.join(map(str, fits)) or 'only -1'}",
                param="group_size",
            )
        return in_features // size

    def block(self, out_features: int, in_features: int) -> tuple[int, int]:
        """Rows and columns that have one scale, of a layer [out_features, in_features]."""
        rows = out_features if self.block_rows == -1 else min(self.block_rows, out_features)
        return rows, in_features if self.group_size == -1 else min(self.group_size, in_features)

    @property
    def name(self) -> str:
        """The field's name, e.g. W4A16, W4A16_ASYM, W8A8 or FP8_DYNAMIC."""
        if self.number == "e4m3":
            return self._fp8_name()
        inputs = 8 if self.activations else 16
        return f"W{self.bits}A{inputs}" + ("" if self.symmetric else "_ASYM")

    def _fp8_name(self) -> str:
        if self.group_size != -1:
            kind = "FP8_BLOCK"
        elif self.block_rows == 1 and self.activations == "dynamic":
            kind = "FP8_DYNAMIC"
        else:
            kind = "FP8" if self.block_rows == -1 else "FP8_CHANNEL"
        return kind if self.activations else f"{kind}_A16"


def fp8_scheme(name: str) -> QuantScheme:
    """What `--scheme` means by FP8_DYNAMIC (a scale a row), FP8_BLOCK (128 x 128) or FP8 (a scale
    a tensor, and one for its inputs).
    """
    blocks = {"FP8_DYNAMIC": (1, -1), "FP8_BLOCK": (FP8_BLOCK, FP8_BLOCK), "FP8": (-1, -1)}
    rows, group = blocks[name]
    return QuantScheme(
        bits=8,
        group_size=group,
        symmetric=True,
        number="e4m3",
        block_rows=rows,
        activations="static" if name == "FP8" else "dynamic",
    )


def w8a8_scheme() -> QuantScheme:
    """8-bit integers by row, for inputs that are rounded to 8 bits per token."""
    return QuantScheme(bits=8, group_size=-1, symmetric=True, activations="dynamic")


@dataclass(slots=True, kw_only=True)
class QuantizedLinear:
    """A quantized weight W ≈ (codes − zero_points[:, g_idx]) · scales[:, g_idx].

    codes: [out_features, in_features], uint8, 0 … 2^bits − 1; for float8 the bits of the value
    scales: [out_features, groups], float16/bfloat16/float32, as stored on disk; rows of a block
        repeat them
    zero_points: [out_features, groups], uint8 (2^(bits−1) everywhere when symmetric, 0 for float8)
    g_idx: [in_features], int32, group of each input feature; None means index // group_size
    bias: [out_features] or None
    input_scale: [1], by which engines with static activations round the inputs; None without
    """

    codes: Tensor
    scales: Tensor
    zero_points: Tensor
    scheme: QuantScheme
    g_idx: Tensor | None = None
    bias: Tensor | None = field(default=None)
    input_scale: Tensor | None = field(default=None)

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        return (self.codes.shape[0], self.codes.shape[1])

    def dequantize(self) -> Tensor:
        """Return the weight [out_features, in_features], float32, computed from float32 scales."""
        from qdeploy.quantization.numerics import dequantize, e4m3_values

        if self.scheme.number == "e4m3":
            values = e4m3_values(self.codes)
            return dequantize(values, self.scales, self.zero_points, self.g_idx)
        return dequantize(self.codes, self.scales, self.zero_points, self.g_idx)
