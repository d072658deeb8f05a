"""Quantize and dequantize on tensors: the oracle of every format and kernel. Pure functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qdeploy.quantization.scheme import E4M3_MAX, QuantScheme


def forward_dtype() -> torch.dtype:
    """What linears compute in over calibration tokens: bfloat16 on a CPU that multiplies it.

    That is about twice as fast there, and its rounding (2^-9) is small beside that of weights.
    Norms, residuals and statistics are float32 in any case.
    """
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    fast = capabilities.get("avx512_bf16") or capabilities.get("amx_bf16")
    return torch.bfloat16 if fast else torch.float32


def expand_groups(per_group: Tensor, in_features: int, g_idx: Tensor | None) -> Tensor:
    """Spread [out, groups] over input features: [out, in_features]."""
    if g_idx is not None:
        return per_group[:, g_idx.long()]
    return per_group.repeat_interleave(in_features // per_group.shape[1], dim=1)


def dequantize(
    codes: Tensor, scales: Tensor, zero_points: Tensor, g_idx: Tensor | None = None
) -> Tensor:
    """W = (codes − zero_points) · scales, float32 [out, in]; inputs as in QuantizedLinear, for
    float8 the codes' values.
    """
    in_features = codes.shape[1]
    zeros = expand_groups(zero_points.float(), in_features, g_idx)
    return (codes.float() - zeros) * expand_groups(scales.float(), in_features, g_idx)


def quantize(
    weight: Tensor,
    scales: Tensor,
    zero_points: Tensor,
    scheme: QuantScheme,
    g_idx: Tensor | None = None,
) -> Tensor:
    """Round to the nearest code: uint8 [out, in]. Doesn't modify its inputs."""
    in_features = weight.shape[1]
    scaled = weight.float() / expand_groups(scales.float(), in_features, g_idx)
    codes = (scaled + expand_groups(zero_points.float(), in_features, g_idx)).round()
    return codes.clamp(0, scheme.max_code).to(torch.uint8)


def e4m3_values(codes: Tensor) -> Tensor:
    """Float32 values of float8 (e4m3fn) bits, uint8 of any shape; 0x7f and 0xff are NaN."""
    return codes.view(torch.float8_e4m3fn).float()


def e4m3_codes(values: Tensor) -> Tensor:
    """Bits (uint8) of the nearest float8, ties to even; what is beyond ±448 becomes that."""
    held = values.clamp(-E4M3_MAX, E4M3_MAX)
    return held.to(torch.float8_e4m3fn).view(torch.uint8)


def storable_scales(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Round scales to the dtype on disk without losing any to zero or infinity.

    A group of tiny weights underflows in float16 (AutoAWQ issues 498, 577: 0/0 later on), so
    scales are clamped to the dtype's smallest normal and largest finite number.
    """
    info = torch.finfo(dtype)
    return scales.clamp(min=info.smallest_normal, max=info.max).to(dtype)


def grouped_range(weight: Tensor, scheme: QuantScheme) -> tuple[Tensor, Tensor]:
    """Least and greatest value of each group, [out, groups]; the range always includes 0."""
    grouped = weight.float().view(weight.shape[0], scheme.groups(weight.shape[1]), -1)
    return grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)


def range_qparams(low: Tensor, high: Tensor, scheme: QuantScheme) -> tuple[Tensor, Tensor]:
    """Scales (float32, exact in float16) and zero points (uint8) that cover [low, high].

    The scale is rounded to float16, its dtype on disk, before anything is computed from it: codes
    and zero points then belong to the scale that a reader sees. Any shape, elementwise.
    """
    if scheme.symmetric:
        scales = torch.maximum(high, -low) * (2 / scheme.max_code)
    else:
        scales = (high - low) / scheme.max_code
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    scales = storable_scales(scales, torch.float16).float()
    if scheme.symmetric:
        zeros = torch.full_like(scales, scheme.mid_code)
    else:
        zeros = (-low / scales).round().clamp(0, scheme.max_code)
    return scales, zeros.to(torch.uint8)


def fake_quantize(weight: Tensor, scheme: QuantScheme) -> Tensor:
    """Round to the nearest min-max code and back: float32 [out, in], for searches."""
    out_features, in_features = weight.shape
    scales, zeros = range_qparams(*grouped_range(weight, scheme), scheme)
    grouped = weight.view(out_features, scheme.groups(in_features), -1)
    return round_grouped(grouped, scales, zeros, scheme).view(out_features, in_features)


def round_grouped(grouped: Tensor, scales: Tensor, zeros: Tensor, scheme: QuantScheme) -> Tensor:
    """Quantize and dequantize [out, groups, group] by [out, groups] scales and zero points."""
    step, offset = scales.unsqueeze(-1), zeros.float().unsqueeze(-1)
    codes = (grouped / step).add_(offset).round_().clamp_(0, scheme.max_code)
    return codes.sub_(offset).mul_(step)
