"""Stored shapes against config.json: weights of another model must not get as far as a matmul."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from qdeploy.errors import FormatError
from qdeploy.formats.hf import TensorFolder

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_DECODER_MODULE = re.compile(r"(model\.)?(embed_tokens|layers\.\d+\.(self_attn|mlp)\.\w+)|lm_head")
#: Linear's last name → (config key of out_features, of in_features); None: not fixed by one key.
_FEATURES: dict[str, tuple[str | None, str | None]] = {
    "q_proj": (None, "hidden_size"),
    "k_proj": (None, "hidden_size"),
    "v_proj": (None, "hidden_size"),
    "o_proj": ("hidden_size", None),
    "gate_proj": ("intermediate_size", "hidden_size"),
    "up_proj": ("intermediate_size", "hidden_size"),
    "down_proj": ("hidden_size", "intermediate_size"),
    "embed_tokens": ("vocab_size", "hidden_size"),
    "lm_head": ("vocab_size", "hidden_size"),
}


def check_config_shapes(folder: TensorFolder, packed: Mapping[str, tuple[int, int]]) -> None:
    """Raise FormatError for a decoder layer that is missing, or a linear of another size.

    packed: packed modules → (out_features, in_features). Checks what a config says by itself;
    the runtime's model checks the rest. Experts and other towers have sizes of their own.
    """
    config = folder.config
    _check_layers(folder, config.get("num_hidden_layers"))
    for module, shape in _linears(folder, packed).items():
        if not _DECODER_MODULE.fullmatch(module):
            continue
        keys = _FEATURES.get(module.rpartition(".")[2], (None, None))
        for key, found, side in zip(keys, shape, ("output", "input"), strict=True):
            expected = config.get(key) if key else None
            if isinstance(expected, int) and expected != found and not _is_moe(config, key):
                raise FormatError(
                    f"{folder.path}: {module} has {found} {side} features, but config.json says "
                    f"{key}={expected}; do config and weights belong together?"
                )


def _linears(
    folder: TensorFolder, packed: Mapping[str, tuple[int, int]]
) -> dict[str, tuple[int, int]]:
    found = dict(packed)
    for name in folder.names():
        module, _, last = name.rpartition(".")
        shape = folder.shape(name)
        if last == "weight" and len(shape) == 2:
            found[module] = (shape[0], shape[1])
    return dict(sorted(found.items()))


def _check_layers(folder: TensorFolder, num_layers: Any) -> None:
    present = {int(m[1]) for name in folder.names() if (m := _LAYER.search(name))}
    if not isinstance(num_layers, int) or not present:
        return
    for index in range(num_layers):
        if index not in present:
            raise FormatError(
                f"{folder.path}: decoder layer {index} of {num_layers} has no tensors; "
                "fetch the model again"
            )


def _is_moe(config: Mapping[str, Any], key: str | None) -> bool:
    moe = any(name in config for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    return moe and key == "intermediate_size"
