"""Norms, activations and rotations. Each row's bits depend on that row only."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

ACTIVATIONS = ("silu", "gelu_tanh", "gelu")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """X [..., n] / rms(x) · weight [n], float32 (Zhang & Sennrich 2019).

    The offset of (1 + w) norms is in the weight already.
    """
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def activate(x: Tensor, activation: str) -> Tensor:
    """`activation`, one of ACTIVATIONS, of x; same shape, float32."""
    if activation == "silu":
        return silu(x)
    return gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def rope_angles(
    positions: Tensor, inverse_frequencies: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [num_tokens, 1, head_dim], float32, each multiplied by `scale`.

    positions: [num_tokens]; inverse_frequencies: [head_dim / 2], radians per position
    """
    angles = positions[:, None].float() * inverse_frequencies
    angles = torch.cat((angles, angles), dim=-1)[:, None]
    return angles.cos() * scale, angles.sin() * scale


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of every head (Su et al. 2021, in the half-split layout).

    x: [num_tokens, heads, head_dim]; cos, sin: [num_tokens, 1, head_dim]; float32
    """
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def soft_cap(x: Tensor, cap: float | None) -> Tensor:
    """Cap · tanh(x / cap), or x itself when there is no cap (Gemma 2)."""
    return x if cap is None else torch.tanh(x / cap) * cap
