"""What a quantized linear layer is: the scheme (a value) and the codes (tensors)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from qdeploy.errors import UsageError

if TYPE_CHECKING:  # recipes import this file, and `qdeploy --help` must not wait for torch
    from torch import Tensor

Bits = Literal[2, 3, 4, 8]
#: What embedding and head can have: bits, and group sizes, the largest that divides first.
TABLE_BITS = (8, 4)
TABLE_GROUP_SIZES = (64, 32, 16, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantScheme:
    """How the weight of one linear layer is quantized.

    `group_size` counts input features; -1 is one group for the whole row.
    """

    bits: int = 4
    group_size: int = 64
    symmetric: bool = False
    act_order: bool = False

    def __post_init__(self) -> None:
        if self.bits not in (2, 3, 4, 8):
            raise UsageError(f"bits={self.bits} is not supported; choose 2, 3, 4 or 8")
        if self.group_size != -1 and self.group_size < 8:
            raise UsageError(f"group_size={self.group_size} is not supported; choose -1 or ≥ 8")

    @property
    def max_code(self) -> int:
        """The largest unsigned code, 2^bits − 1."""
        return (1 << self.bits) - 1

    @property
    def mid_code(self) -> int:
        """The code of zero under symmetric quantization, 2^(bits − 1)."""
        return 1 << (self.bits - 1)

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

    @property
    def name(self) -> str:
        """The field's name, e.g. W4A16 or W4A16_ASYM."""
        return f"W{self.bits}A16" + ("" if self.symmetric else "_ASYM")


@dataclass(slots=True, kw_only=True)
class QuantizedLinear:
    """A quantized weight W ≈ (codes − zero_points[:, g_idx]) · scales[:, g_idx].

    codes: [out_features, in_features], uint8, 0 … 2^bits − 1
    scales: [out_features, groups], float16/bfloat16/float32, as stored on disk
    zero_points: [out_features, groups], uint8 (2^(bits−1) everywhere when symmetric)
    g_idx: [in_features], int32, group of each input feature; None means index // group_size
    bias: [out_features] or None
    """

    codes: Tensor
    scales: Tensor
    zero_points: Tensor
    scheme: QuantScheme
    g_idx: Tensor | None = None
    bias: Tensor | None = field(default=None)

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        return (self.codes.shape[0], self.codes.shape[1])

    def dequantize(self) -> Tensor:
        """Return the weight [out_features, in_features], float32, computed from float32 scales."""
        from qdeploy.quantization.numerics import dequantize

        return dequantize(self.codes, self.scales, self.zero_points, self.g_idx)
