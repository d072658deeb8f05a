"""Norms, activations and rotations. Each row's bits depend on that row only.

torch computes transcendental functions with vector code, but the last elements of each thread's
share with scalar code, which rounds differently. They go through `_in_chunks` therefore: pieces
that one thread takes and that end at a vector's end.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import gelu, pad, silu

ACTIVATIONS = ("silu", "gelu_tanh", "gelu")
#: Below torch's grain size of 32,768 elements, from which it splits work between threads.
_CHUNK = 16384
#: A multiple of what torch's vector loops take at once, on any instruction set.
_LANES = 64


def _in_chunks(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """An elementwise function of x, the same bits for an element at any place and thread count."""
    flat = pad(x.reshape(-1), (0, -x.numel() % _LANES))
    parts = [function(part) for part in flat.split(_CHUNK)]
    return torch.cat(parts)[: x.numel()].view(x.shape)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """X [..., n] / rms(x) · weight [n], float32 (Zhang & Sennrich 2019).

    The offset of (1 + w) norms is in the weight already.
    """
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def activate(x: Tensor, activation: str) -> Tensor:
    """`activation`, one of ACTIVATIONS, of x; same shape, float32."""
    if activation == "silu":
        return _in_chunks(silu, x)
    approximate = "tanh" if activation == "gelu_tanh" else "none"
    return _in_chunks(partial(gelu, approximate=approximate), x)


def rope_angles(
    positions: Tensor, inverse_frequencies: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [num_tokens, 1, head_dim], float32, each multiplied by `scale`.

    positions: [num_tokens]; inverse_frequencies: [head_dim / 2], radians per position
    """
    angles = positions[:, None].float() * inverse_frequencies
    angles = torch.cat((angles, angles), dim=-1)[:, None]
    return _in_chunks(torch.cos, angles) * scale, _in_chunks(torch.sin, angles) * scale


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of every head (Su et al. 2021, in the half-split layout).

    x: [num_tokens, heads, head_dim]; cos, sin: [num_tokens, 1, head_dim]; float32
    """
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def soft_cap(x: Tensor, cap: float | None) -> Tensor:
    """Cap · tanh(x / cap), or x itself when there is no cap (Gemma 2)."""
    return x if cap is None else _in_chunks(torch.tanh, x / cap) * cap
