"""Rotary position embedding: which frequencies, as data (Su et al. 2021)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qdeploy.errors import FormatError

#: Kind → keys that its scaling must have. Kinds whose frequencies depend on a prompt's length
#: (dynamic, longrope) would break P2.
KINDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """One kind of rotary embedding; `factor` and what follows are used by scaled kinds only.

    attention_factor: cosines and sines are multiplied by it (yarn)
    beta_fast, beta_slow: rotations over the original context that bound yarn's ramp
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def inverse_frequencies(self, head_dim: int) -> Tensor:
        """[head_dim / 2], float32, radians per position."""
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        base = 1.0 / (self.theta**exponents)
        if self.kind == "linear":
            return base / self.factor
        if self.kind == "llama3":
            return self._blend(base, self._llama3_share(base))
        return self._blend(base, self._yarn_share(head_dim)) if self.kind == "yarn" else base

    def _blend(self, base: Tensor, kept: Tensor) -> Tensor:
        """Stretch waves by `factor` but for the share that is kept."""
        return (1 - kept) * (base / self.factor) + kept * base

    def _llama3_share(self, base: Tensor) -> Tensor:
        """Llama 3.1: short waves are kept, long ones stretched, a ramp between them."""
        rotations = self.original_max_position * base / (2 * math.pi)
        span = self.high_freq_factor - self.low_freq_factor
        return ((rotations - self.low_freq_factor) / span).clamp(0, 1)

    def _yarn_share(self, head_dim: int) -> Tensor:
        """YaRN (Peng et al. 2023), eq. 17–18: a ramp over dimensions, by rotations."""
        low, high = (
            self._yarn_dim(self.beta_fast, head_dim),
            self._yarn_dim(self.beta_slow, head_dim),
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        span = max(high - low, 0.001)
        return 1 - ((torch.arange(head_dim // 2).float() - low) / span).clamp(0, 1)

    def _yarn_dim(self, rotations: float, head_dim: int) -> float:
        """The dimension that turns `rotations` times over the original context."""
        wave = self.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(wave) / (2 * math.log(self.theta))


def parse_rope(config: Mapping[str, Any], layer_type: str) -> RopeSpec:
    """Read transformers 5's `rope_parameters` (flat or per layer type), or the older keys.

    Raises FormatError for a kind or a share of rotated channels that the runtime doesn't have.
    """
    parameters = config.get("rope_parameters")
    local = config.get("rope_local_base_freq") if layer_type == "sliding_attention" else None
    theta = float(local or config.get("rope_theta") or 10000.0)
    if parameters is not None:
        nested = parameters.get(layer_type)
        return _parse_scaling(parameters if nested is None else nested, theta, config)
    # Gemma 3's older key gives sliding layers a theta of their own, and scales full layers only.
    scaling = None if local else config.get("rope_scaling")
    return _parse_scaling(scaling or {}, theta, config)


def _parse_scaling(data: Mapping[str, Any], theta: float, config: Mapping[str, Any]) -> RopeSpec:
    kind = data.get("rope_type", data.get("type")) or "default"
    if kind not in KINDS:
        raise FormatError(
            f"RoPE kind {kind!r} is not supported by the runtime (known: {', '.join(KINDS)}); "
            "the artifact can still be served on vLLM"
        )
    for key in KINDS[kind]:
        if data.get(key) is None:
            raise FormatError(f"config.json lacks {key!r} of its RoPE kind {kind!r}")
    share = data.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if share not in (None, 1):
        raise FormatError(
            f"partial_rotary_factor={share} is not supported by the runtime (known: 1); "
            "the artifact can still be served on vLLM"
        )
    original = data.get("original_max_position_embeddings") or config.get("max_position_embeddings")
    factor = float(data.get("factor") or 1.0)
    return RopeSpec(
        theta=float(data.get("rope_theta") or theta),
        kind=kind,
        factor=factor,
        low_freq_factor=float(data.get("low_freq_factor") or 1.0),
        high_freq_factor=float(data.get("high_freq_factor") or 4.0),
        original_max_position=int(original or 8192),
        attention_factor=_attention_factor(data, factor) if kind == "yarn" else 1.0,
        beta_fast=float(data.get("beta_fast") or 32),
        beta_slow=float(data.get("beta_slow") or 1),
        truncate=bool(data.get("truncate", True)),
    )


def _attention_factor(data: Mapping[str, Any], factor: float) -> float:
    """YaRN's temperature, folded into the rotation: 0.1 · ln(factor) + 1 unless the config says."""
    if data.get("attention_factor") is not None:
        return float(data["attention_factor"])
    scale, all_dim = data.get("mscale"), data.get("mscale_all_dim")
    if scale and all_dim:
        return _temperature(factor, scale) / _temperature(factor, all_dim)
    return _temperature(factor, 1.0)


def _temperature(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
