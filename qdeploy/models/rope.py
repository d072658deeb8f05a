"""Rotary position embedding: which frequencies, as data (Su et al. 2021; Llama 3 scaling)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qdeploy.errors import FormatError

KINDS = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """One kind of rotary embedding; `factor` and what follows are used by scaled kinds only."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def inverse_frequencies(self, head_dim: int) -> Tensor:
        """[head_dim / 2], float32, radians per position."""
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        base = 1.0 / (self.theta**exponents)
        if self.kind == "linear":
            return base / self.factor
        return self._llama3(base) if self.kind == "llama3" else base

    def _llama3(self, base: Tensor) -> Tensor:
        """Long waves are stretched by `factor`, short ones kept, those between blended."""
        wavelength = 2 * math.pi / base
        rotations = self.original_max_position / wavelength
        smooth = (rotations - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        smooth = smooth.clamp(0, 1)
        return (1 - smooth) * base / self.factor + smooth * base


def parse_rope(config: Mapping[str, Any], layer_type: str) -> RopeSpec:
    """Read transformers 5's `rope_parameters` (flat or per layer type), or the older keys."""
    parameters = config.get("rope_parameters")
    if parameters is None:
        return _parse_old(config, layer_type)
    nested = parameters.get(layer_type)
    return _parse_scaling(nested if nested is not None else parameters, config)


def _parse_old(config: Mapping[str, Any], layer_type: str) -> RopeSpec:
    theta = float(config.get("rope_theta", 10000.0))
    local = config.get("rope_local_base_freq")
    if layer_type == "sliding_attention" and local is not None:
        return RopeSpec(theta=float(local))  # Gemma 3 scales full layers only
    return _parse_scaling({"rope_theta": theta} | (config.get("rope_scaling") or {}), config)


def _parse_scaling(data: Mapping[str, Any], config: Mapping[str, Any]) -> RopeSpec:
    kind = data.get("rope_type", data.get("type", "default")) or "default"
    if kind not in KINDS:
        raise FormatError(
            f"RoPE kind {kind!r} is not supported by the runtime (known: {', '.join(KINDS)}); "
            "the checkpoint can still be quantized and served elsewhere"
        )
    original = data.get("original_max_position_embeddings")
    return RopeSpec(
        theta=float(data.get("rope_theta", config.get("rope_theta", 10000.0))),
        kind=kind,
        factor=float(data.get("factor", 1.0)),
        low_freq_factor=float(data.get("low_freq_factor", 1.0)),
        high_freq_factor=float(data.get("high_freq_factor", 4.0)),
        original_max_position=int(original or config.get("max_position_embeddings", 8192)),
    )
