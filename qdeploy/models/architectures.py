"""One row per architecture: which switches of DecoderSpec its config sets.

Defaults are those of transformers' config classes: older config.json files leave them out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from qdeploy.errors import FormatError
from qdeploy.models.rope import parse_rope
from qdeploy.models.spec import DecoderSpec
from qdeploy.registry import Registry

Config = Mapping[str, Any]
ARCHITECTURES: Registry[Callable[[Config], DecoderSpec]] = Registry("architecture")

#: config.json's hidden_act to ours.
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
}


_LAYER_TYPES = ("full_attention", "sliding_attention")


def _layer_types(config: Config, num_layers: int) -> list[str]:
    """`full_attention` or `sliding_attention` per layer, as config.json gives them."""
    types = config.get("layer_types")
    if types is None:
        return ["full_attention"] * num_layers
    for kind in types:
        if kind not in _LAYER_TYPES:
            raise FormatError(
                f"layer type {kind!r} is not supported by the runtime (known: "
                f"{', '.join(_LAYER_TYPES)}); the artifact can still be served on vLLM"
            )
    if len(types) != num_layers:
        raise FormatError(f"config.json has {len(types)} layer_types for {num_layers} layers")
    return list(types)


def _decoder(config: Config, **switches: Any) -> DecoderSpec:
    """What all architectures read alike, with the row's own switches put over it."""
    num_layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    types = _layer_types(config, num_layers)
    window = config.get("sliding_window")
    if window is None and "sliding_attention" in types:
        raise FormatError("config.json has sliding layers but no sliding_window")
    common = {
        "architecture": config["architectures"][0],
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["intermediate_size"],
        "num_layers": num_layers,
        "num_q_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": head_dim,
        "max_model_len": config["max_position_embeddings"],
        "norm_eps": config["rms_norm_eps"],
        "tied_embeddings": config.get("tie_word_embeddings", False),
        "attention_scale": 1 / math.sqrt(head_dim),
        "activation": _activation(config.get("hidden_act", "silu")),
        "sliding_windows": tuple(window if t == "sliding_attention" else None for t in types),
        "rope": tuple(parse_rope(config, t) for t in types),
    }
    return DecoderSpec(**(common | switches))


def _activation(name: str) -> str:
    if name not in _ACTIVATIONS:
        raise FormatError(
            f"activation {name!r} is not one the runtime has ({', '.join(_ACTIVATIONS)})"
        )
    return _ACTIVATIONS[name]


def _attention_bias(config: Config) -> dict[str, bool]:
    bias = bool(config.get("attention_bias", False))
    return {"qkv_bias": bias, "o_bias": bias}


def _llama(config: Config) -> DecoderSpec:
    # Llama has no sliding window, whatever else its config carries.
    full = {**config, "layer_types": None}
    return _decoder(full, mlp_bias=bool(config.get("mlp_bias")), **_attention_bias(config))


def _mistral(config: Config) -> DecoderSpec:
    """Every layer slides, or none does."""
    window = config.get("sliding_window", 4096)
    kind = "full_attention" if window is None else "sliding_attention"
    kinds = [kind] * config["num_hidden_layers"]
    return _decoder({**config, "sliding_window": window, "layer_types": kinds})


def _qwen_windows(config: Config) -> Config:
    """Qwen's own rule: the layers from max_window_layers on slide, if use_sliding_window is set."""
    if config.get("layer_types") is not None:
        return config
    slides = config.get("use_sliding_window", False) and config.get("sliding_window", 4096)
    first = config.get("max_window_layers", 28) if slides else config["num_hidden_layers"]
    kinds = (_LAYER_TYPES[i >= first] for i in range(config["num_hidden_layers"]))
    return {"sliding_window": 4096, **config, "layer_types": list(kinds)}


def _qwen2(config: Config) -> DecoderSpec:
    return _decoder(_qwen_windows(config), qkv_bias=True)


def _qwen3(config: Config) -> DecoderSpec:
    full = {"head_dim": 128, **_qwen_windows(config)}
    return _decoder(full, qk_norm=True, **_attention_bias(config))


_GEMMA3_DEFAULTS = {
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "rope_local_base_freq": 10_000.0,
    "rope_theta": 1_000_000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}


def _gemma3(config: Config) -> DecoderSpec:
    if config.get("use_bidirectional_attention"):
        raise FormatError("use_bidirectional_attention is not supported: the runtime is causal")
    # attn_logit_softcapping is a key of Gemma 2's that transformers doesn't apply to Gemma 3.
    full = {**_GEMMA3_DEFAULTS, **config}
    if full.get("layer_types") is None:
        pattern = config.get("sliding_window_pattern", config.get("_sliding_window_pattern", 6))
        kinds = (_LAYER_TYPES[bool((i + 1) % pattern)] for i in range(full["num_hidden_layers"]))
        full["layer_types"] = list(kinds)
    return _decoder(
        full,
        activation=_activation(full.get("hidden_activation", "gelu_pytorch_tanh")),
        norm_offset=1.0,
        qk_norm=True,
        sandwich_norms=True,
        attention_scale=full["query_pre_attn_scalar"] ** -0.5,
        embedding_multiplier=math.sqrt(full["hidden_size"]),
        logit_soft_cap=full.get("final_logit_softcapping"),
        **_attention_bias(full),
    )


ARCHITECTURES.add("LlamaForCausalLM", _llama)
ARCHITECTURES.add("MistralForCausalLM", _mistral)
ARCHITECTURES.add("Qwen2ForCausalLM", _qwen2)
ARCHITECTURES.add("Qwen3ForCausalLM", _qwen3)
ARCHITECTURES.add("Gemma3ForCausalLM", _gemma3)
