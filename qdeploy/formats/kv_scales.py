"""Static float8 scales of K and V, as other engines read them: formats.md §6.

`model.layers.N.self_attn.k_scale` and `.v_scale`, one element each, beside a quantization config
whose `kv_cache_scheme` says so. vLLM and SGLang read them; qdeploy's own fp8 cache scales every
block by itself, which is finer, and leaves them alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from qdeploy.formats.artifact import ArtifactWriter
from qdeploy.formats.checkpoint import Checkpoint
from qdeploy.kv.auto import KVLayerStats

#: Weight formats whose readers look for such scales.
CARRIERS = ("compressed-tensors", "fp8")
NO_CARRIER = "they are in qdeploy.json; --format compressed-tensors has them for other engines"
#: One scale for all heads, from calibration.
_SCHEME = {
    "num_bits": 8,
    "type": "float",
    "symmetric": True,
    "strategy": "tensor",
    "dynamic": False,
}
_SCALE = re.compile(r"(.*\.layers\.(\d+)\..*)\b([kv])_scale$")


def scale_tensors(
    layer_name: str, k_scale: float, v_scale: float, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The two tensors of a layer by full name, [1], in the model's dtype.

    Rounded up: a scale that rounding made smaller would clip the largest value.
    """
    return {
        f"{layer_name}.self_attn.{name}": _rounded_up(value, dtype)
        for name, value in (("k_scale", k_scale), ("v_scale", v_scale))
    }


def add_scales(
    writer: ArtifactWriter,
    config: dict[str, Any],
    statistics: Sequence[KVLayerStats],
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Write every layer's scales; returns the quantization config that announces them, where its
    format has a key for that.
    """
    for stats in statistics:
        name = f"model.layers.{stats.layer}"
        for full, tensor in scale_tensors(name, stats.k_scale, stats.v_scale, dtype).items():
            writer.add_scale(full, tensor)
    return announce_scales(config)


def announce_scales(config: dict[str, Any]) -> dict[str, Any]:
    """The quantization config with what says that scales are stored, if its format has that."""
    if config["quant_method"] != "compressed-tensors":
        return config
    return config | {"kv_cache_scheme": dict(_SCHEME)}


def scale_names(checkpoint: Checkpoint) -> set[str]:
    """Full names of the stored scales."""
    return {name for name in checkpoint.names() if _SCALE.match(name)}


def read_scales(checkpoint: Checkpoint) -> dict[int, dict[str, float]]:
    """Stored scales by layer, then `k` or `v`; the largest where heads have their own."""
    found: dict[int, dict[str, float]] = {}
    for name in sorted(checkpoint.names()):
        if match := _SCALE.match(name):
            value = checkpoint.tensor(name).float().max().item()
            found.setdefault(int(match[2]), {})[match[3]] = value
    return dict(sorted(found.items()))


def scales_line(scales: Mapping[int, Mapping[str, float]]) -> str:
    """What is stored, and who uses it."""
    spans = []
    for name in "kv":
        values = [layer[name] for layer in scales.values() if name in layer]
        if values:
            spans.append(f"{name} {min(values):.3g} to {max(values):.3g}")
    return (
        f"static KV scales of {len(scales)} layers ({', '.join(spans)}): for engines with one "
        "scale a layer; qdeploy's fp8 cache scales every block by itself and leaves them alone"
    )


def scale_findings(
    config: Mapping[str, Any], scales: Mapping[int, Mapping[str, float]]
) -> list[str]:
    """One line for each fault of the stored scales; they may be absent unless announced."""
    quantization = config.get("quantization_config") or {}
    scheme = quantization.get("kv_cache_scheme")
    announced = isinstance(scheme, Mapping) and scheme.get("dynamic") is False
    layers = range(int(config.get("num_hidden_layers") or 0)) if announced else scales
    return [*_missing(layers, scales), *_useless(scales)]


def _missing(layers: Iterable[int], scales: Mapping[int, Mapping[str, float]]) -> list[str]:
    return [
        f"layer {layer}: {name}_scale of the KV cache is missing; engines take 1.0 for it"
        for layer in layers
        for name in "kv"
        if name not in scales.get(layer, {})
    ]


def _useless(scales: Mapping[int, Mapping[str, float]]) -> list[str]:
    values = [value for layer in scales.values() for value in layer.values()]
    if any(not 0 < value < float("inf") for value in values):
        return ["a scale of the KV cache isn't a positive number; calibrate again"]
    if values and all(value == 1 for value in values):
        return ["every scale of the KV cache is 1.0: calibration wasn't stored; calibrate again"]
    return []


def _rounded_up(value: float, dtype: torch.dtype) -> Tensor:
    exact = torch.tensor([value], dtype=torch.float64)
    rounded = exact.to(dtype)
    if rounded.double() < exact:
        rounded = torch.nextafter(rounded, torch.full_like(rounded, torch.inf))
    return rounded
