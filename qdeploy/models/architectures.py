"""One row per architecture: which switches of DecoderSpec its config sets."""

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


def _layer_types(config: Config, num_layers: int) -> list[str]:
    """`full_attention` or `sliding_attention` per layer."""
    types = config.get("layer_types")
    if types is not None:
        return list(types)
    pattern = config.get("sliding_window_pattern", config.get("_sliding_window_pattern"))
    if pattern is not None:
        full = [(layer + 1) % pattern == 0 for layer in range(num_layers)]
        return ["full_attention" if is_full else "sliding_attention" for is_full in full]
    if config.get("sliding_window") is None or not config.get("use_sliding_window", True):
        return ["full_attention"] * num_layers
    first = config.get("max_window_layers", 0)
    return ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]


def _decoder(config: Config, **switches: Any) -> DecoderSpec:
    """What all architectures read alike, with the row's own switches put over it."""
    num_layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    types = _layer_types(config, num_layers)
    window = config.get("sliding_window")
    activation = switches.pop("activation", config.get("hidden_act", "silu"))
    if activation not in _ACTIVATIONS:
        raise FormatError(
            f"activation {activation!r} is not one the runtime has ({', '.join(_ACTIVATIONS)})"
        )
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
        "activation": _ACTIVATIONS[activation],
        "sliding_windows": tuple(window if t == "sliding_attention" else None for t in types),
        "rope": tuple(parse_rope(config, t) for t in types),
    }
    return DecoderSpec(**(common | switches))


def _attention_bias(config: Config) -> dict[str, bool]:
    bias = bool(config.get("attention_bias", False))
    return {"qkv_bias": bias, "o_bias": bias}


def _llama(config: Config) -> DecoderSpec:
    # Llama has no sliding window, whatever else its config carries.
    full = dict(config) | {"sliding_window": None, "layer_types": None}
    return _decoder(full, mlp_bias=bool(config.get("mlp_bias")), **_attention_bias(config))


def _mistral(config: Config) -> DecoderSpec:
    return _decoder(config)


def _qwen2(config: Config) -> DecoderSpec:
    default = {"use_sliding_window": False}
    return _decoder(default | dict(config), qkv_bias=True)


def _qwen3(config: Config) -> DecoderSpec:
    default = {"use_sliding_window": False}
    return _decoder(default | dict(config), qk_norm=True, **_attention_bias(config))


def _gemma3(config: Config) -> DecoderSpec:
    default = {"tie_word_embeddings": True, "sliding_window_pattern": 6}
    return _decoder(
        default | dict(config),
        activation=config.get("hidden_activation", "gelu_pytorch_tanh"),
        norm_offset=1.0,
        qk_norm=True,
        sandwich_norms=True,
        attention_scale=config["query_pre_attn_scalar"] ** -0.5,
        embedding_multiplier=math.sqrt(config["hidden_size"]),
        attention_soft_cap=config.get("attn_logit_softcapping"),
        logit_soft_cap=config.get("final_logit_softcapping"),
        **_attention_bias(config),
    )


ARCHITECTURES.add("LlamaForCausalLM", _llama)
ARCHITECTURES.add("MistralForCausalLM", _mistral)
ARCHITECTURES.add("Qwen2ForCausalLM", _qwen2)
ARCHITECTURES.add("Qwen3ForCausalLM", _qwen3)
ARCHITECTURES.add("Gemma3ForCausalLM", _gemma3)
