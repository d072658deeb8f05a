"""KIVI by block (Liu et al. 2024, "KIVI"): keys per channel over a block's tokens, values per
token over channel groups; a block is quantized once, as a whole, into real bytes.

Integers (int8, int4, k8v4) are asymmetric. fp8 has the same groups, symmetric: float8 E4M3 codes
(the finite kind, up to 448; x ≈ code · scale) and no minimum. In float32, for each group:
    amax  = max |x|
    scale = float16(max(amax / 448 · (1 + 2^-11) + 2^-25, 2^-24)), NaN unless amax < 65504
    code  = e4m3(x / scale), 0 where that is NaN
Both conversions round to nearest, ties to even; the margins round the scale up, so that no code
is over 448.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qdeploy.errors import UsageError

#: Channels that share one scale of a value; smaller heads are one group.
VALUE_GROUP = 64
#: Bits of K and V per sealed format.
BITS = {"int8": (8, 8), "int4": (4, 4), "k8v4": (8, 4), "fp8": (8, 8)}
_HALF_MAX = torch.finfo(torch.float16).max
#: The smallest positive float16: a constant group must not divide by zero.
_SMALLEST_SCALE = 2.0**-24
_HALF_STEP = 2.0**-11
_E4M3 = torch.float8_e4m3fn
_E4M3_MAX = torch.finfo(_E4M3).max


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedLayout:
    """Bytes of one layer's sealed block: K codes, K scales and minima, V codes, V the same; with
    e4m3 there are no minima.

    Codes lie in the order [kv_heads, block_size, head_dim]; those of 4 bits two in a byte, the
    even channel low. Scales and minima are float16, x ≈ code · scale + minimum:
    [kv_heads, head_dim] for K, [kv_heads, block_size, head_dim / value_group] for V.
    """

    bits_k: int
    bits_v: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    e4m3: bool = False

    def __post_init__(self) -> None:
        for bits in (self.bits_k, self.bits_v):
            if bits not in (4, 8):
                raise UsageError(f"KV bits={bits} are not supported; choose 4 or 8")
        if self.e4m3 and (self.bits_k, self.bits_v) != (8, 8):
            raise UsageError("float8 codes have 8 bits; choose kv_cache_dtype fp8, int4 or k8v4")
        if self.head_dim % 2:
            raise UsageError(f"head_dim={self.head_dim} is odd; serve with kv_cache_dtype bf16")

    @property
    def value_group(self) -> int:
        """Channels per value scale."""
        return VALUE_GROUP if self.head_dim % VALUE_GROUP == 0 else self.head_dim

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Bytes of (K codes, K scales and minima, V codes, V scales and minima)."""
        elements = self.num_kv_heads * self.block_size * self.head_dim
        per_group = 2 if self.e4m3 else 4
        return (
            elements * self.bits_k // 8,
            self.num_kv_heads * self.head_dim * per_group,
            elements * self.bits_v // 8,
            elements // self.value_group * per_group,
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of one layer's block."""
        return sum(self.sizes)

    def seal(self, k: Tensor, v: Tensor) -> Tensor:
        """Quantize whole blocks.

        k, v: [..., num_kv_heads, block_size, head_dim], float32; returns uint8 [..., num_bytes].
        A group with a value that float16 can't hold comes back as NaN, never as a wrong number.
        """
        grouped = v.unflatten(-1, (-1, self.value_group))
        if self.e4m3:
            parts = (*_quantize_e4m3(k, -2), *_quantize_e4m3(grouped, -1))
        else:
            k_codes, k_meta = _quantize(k, -2, self.bits_k)
            v_codes, v_meta = _quantize(grouped, -1, self.bits_v)
            parts = (_pack(k_codes, self.bits_k), k_meta, _pack(v_codes, self.bits_v), v_meta)
        return torch.cat([part.reshape(*k.shape[:-3], -1) for part in parts], dim=-1)

    def unseal(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        """The inverse up to rounding: K and V, float32, shaped as `seal` takes them."""
        heads, size, dim = self.num_kv_heads, self.block_size, self.head_dim
        lead, group = packed.shape[:-1], self.value_group
        k_codes, k_meta, v_codes, v_meta = packed.split(self.sizes, dim=-1)
        k_shape, v_shape = (*lead, heads, 1, dim), (*lead, heads, size, dim // group, 1)
        if self.e4m3:
            k = _floats(k_codes, (*lead, heads, size, dim)) * _scales(k_meta, k_shape)
            v = _floats(v_codes, (*lead, heads, size, -1, group)) * _scales(v_meta, v_shape)
            return k, v.flatten(-2)
        k_scale, k_min = _halves(k_meta, k_shape)
        v_scale, v_min = _halves(v_meta, v_shape)
        k = _unpack(k_codes, self.bits_k).reshape(*lead, heads, size, dim) * k_scale + k_min
        v = _unpack(v_codes, self.bits_v).reshape(*lead, heads, size, -1, group) * v_scale + v_min
        return k, v.flatten(-2)


def _quantize(x: Tensor, dim: int, bits: int) -> tuple[Tensor, Tensor]:
    """Codes, uint8 shaped as x, and bytes of scales then minima; one of each per slice along `dim`.

    The minimum is rounded down and the scale up, so that no value of the group is clipped: half a
    float16 step of a large offset (key biases) can be more than a whole code.
    """
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    minimum = (low - low.abs() * _HALF_STEP).half()
    scale = (high - minimum.float()) / ((1 << bits) - 1) * (1 + _HALF_STEP) + _SMALLEST_SCALE / 2
    scale = scale.clamp(min=_SMALLEST_SCALE).half()
    held = (low.abs() < _HALF_MAX) & (high.abs() < _HALF_MAX)  # False for NaN, too
    scale = torch.where(held, scale, float("nan"))
    codes = ((x - minimum.float()) / scale.float()).round().nan_to_num(0)
    return codes.clamp(0, (1 << bits) - 1).to(torch.uint8), _bytes(scale, minimum, x.dim(), dim)


def _quantize_e4m3(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Codes, uint8 shaped as x, and the scales' bytes, as uint8 too: 2 per slice along `dim`."""
    amax = x.abs().amax(dim, keepdim=True)
    scale = amax / _E4M3_MAX * (1 + _HALF_STEP) + _SMALLEST_SCALE / 2
    scale = scale.clamp(min=_SMALLEST_SCALE).half()
    scale = torch.where(amax < _HALF_MAX, scale, float("nan"))  # for NaN, too
    codes = (x / scale.float()).nan_to_num(0).to(_E4M3).view(torch.uint8)
    return codes, scale.contiguous().view(torch.uint8)


def _bytes(scale: Tensor, minimum: Tensor, dims: int, dim: int) -> Tensor:
    """Scales, then minima of a block as bytes [..., n]; a block of K has 3 dimensions, of V 4."""
    lead = scale.shape[: dims - (3 if dim == -2 else 4)]
    both = (scale.reshape(*lead, -1), minimum.reshape(*lead, -1))
    return torch.cat(both, dim=-1).view(torch.uint8)


def _pack(codes: Tensor, bits: int) -> Tensor:
    return codes if bits == 8 else codes[..., ::2] | (codes[..., 1::2] << 4)


def _unpack(packed: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return packed.float()
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).float()


def _floats(codes: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Float8 codes [shape], float32."""
    return codes.contiguous().view(_E4M3).float().reshape(shape)


def _scales(meta: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Scales [shape], float32."""
    return meta.contiguous().view(torch.float16).float().reshape(shape)


def _halves(meta: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Scales and minima [shape], float32."""
    scale, minimum = meta.contiguous().view(torch.float16).float().chunk(2, dim=-1)
    return scale.reshape(shape), minimum.reshape(shape)
