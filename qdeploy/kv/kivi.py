"""KIVI by block (Liu et al. 2024, "KIVI"): keys per channel over a block's tokens, values per
token over channel groups; asymmetric; a block is quantized once, as a whole, into real bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: Channels that share one scale of a value; smaller heads are one group.
VALUE_GROUP = 64
#: Bits of K and V per sealed format.
BITS = {"int8": (8, 8), "int4": (4, 4), "k8v4": (8, 4)}
_HALF = torch.finfo(torch.float16)

@dataclass(frozen=True, slots=True, kw_only=True)
class SealedLayout:
    """Bytes of one layer's sealed block: K codes, K scale and minimum, V codes, V the same.

    Scales and minima are float16. Codes of 4 bits lie two in a byte, the even channel low.
    """

    bits_k: int
    bits_v: int
    block_size: int
    num_kv_heads: int
    head_dim: int

    @property
    def value_group(self) -> int:
        """Channels per value scale."""
        return VALUE_GROUP if self.head_dim % VALUE_GROUP == 0 else self.head_dim

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Bytes of (K codes, K scales and minima, V codes, V scales and minima)."""
        elements = self.num_kv_heads * self.block_size * self.head_dim
        return (
            elements * self.bits_k // 8,
            self.num_kv_heads * self.head_dim * 4,
            elements * self.bits_v // 8,
            elements // self.value_group * 4,
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of one layer's block."""
        return sum(self.sizes)

    def seal(self, k: Tensor, v: Tensor) -> Tensor:
        """Quantize whole blocks.

        k, v: [..., num_kv_heads, block_size, head_dim], float32; returns uint8 [..., num_bytes]
        """
        lead = k.shape[:-3]
        grouped = v.unflatten(-1, (-1, self.value_group))
        parts = [*_quantize(k, -2, self.bits_k), *_quantize(grouped, -1, self.bits_v)]
        return torch.cat([part.reshape(*lead, -1) for part in parts], dim=-1)

    def unseal(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        """The inverse up to rounding: K and V, float32, shaped as `seal` takes them."""
        heads, size, dim = self.num_kv_heads, self.block_size, self.head_dim
        lead, group = packed.shape[:-1], self.value_group
        k_codes, k_meta, v_codes, v_meta = packed.split(self.sizes, dim=-1)
        k_scale, k_min = _halves(k_meta, (*lead, heads, 1, dim))
        v_scale, v_min = _halves(v_meta, (*lead, heads, size, dim // group, 1))
        k = _unpack(k_codes, self.bits_k).view(*lead, heads, size, dim) * k_scale + k_min
        v = _unpack(v_codes, self.bits_v).view(*lead, heads, size, -1, group) * v_scale + v_min
        return k, v.flatten(-2)

def _quantize(x: Tensor, dim: int, bits: int) -> tuple[Tensor, Tensor]:
    """(codes, scales and minima) as bytes; one scale per slice along `dim`.

    The scale never falls below float16's smallest normal number: a constant group would divide
    zero by zero, and its rounding of the minimum is then taken up by the codes.
    """
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    minimum = low.clamp(_HALF.min, _HALF.max).half()
    scale = (high - minimum.float()) / ((1 << bits) - 1)
    scale = scale.clamp(_HALF.smallest_normal, _HALF.max).half()
    codes = ((x - minimum.float()) / scale.float()).round().clamp(0, (1 << bits) - 1)
    lead = x.shape[: x.dim() - (3 if dim == -2 else 4)]

    meta = torch.cat((scale.reshape(*lead, -1), minimum.reshape(*lead, -1)), dim=-1)
    return _pack(codes.to(torch.uint8), bits), meta.view(torch.uint8)

def _pack(codes: Tensor, bits: int) -> Tensor:
    return codes if bits == 8 else codes[..., ::2] | (codes[..., 1::2] << 4)

def _unpack(packed: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return packed.float()
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).float()

def _halves(meta: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Scales and minima [shape], float32."""
    scale, minimum = meta.contiguous().view(torch.float16).float().chunk(2, dim=-1)
    return scale.reshape(shape), minimum.reshape(shape)
