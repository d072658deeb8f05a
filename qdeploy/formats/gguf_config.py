"""GGUF metadata → Hugging Face `config.json`: llama, mistral, qwen2, qwen3 and gemma3 decoders."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from qdeploy.errors import FormatError
from qdeploy.formats.gguf_file import GgufFile

GEMMA3_PATTERN = 6
GEMMA3_27B_LAYERS = 62


def model_config(source: GgufFile) -> dict[str, Any]:
    """`config.json` for the file; raises FormatError for an architecture that isn't known."""
    architecture = source.architecture
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise FormatError(
            f"{source.path}: GGUF architecture {architecture!r} can't be converted; "
            f"use one of {known}, or the model's safetensors folder"
        )
    config = _common(source)
    config.update(ARCHITECTURES[architecture](source, config))
    return config


def generation_config(source: GgufFile) -> dict[str, Any]:
    """`generation_config.json`: token ids, with the end-of-turn token among the EOS ids."""
    ids = token_ids(source)
    ends = [ids["eos_token_id"]] if "eos_token_id" in ids else []
    turn = source.fields.get("tokenizer.ggml.eot_token_id")
    if turn is not None and turn not in ends:
        ends.append(int(turn))
    if ends:
        ids["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    return ids


def token_ids(source: GgufFile) -> dict[str, Any]:
    """bos, eos and pad ids as far as the file names them."""
    keys = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    fields = {
        key: source.fields.get(f"tokenizer.ggml.{name}_token_id") for key, name in keys.items()
    }
    return {key: int(value) for key, value in fields.items() if value is not None}


def _common(source: GgufFile) -> dict[str, Any]:
    heads = source.model_value("attention.head_count")
    hidden = source.model_value("embedding_length")
    if not heads or not hidden:
        raise FormatError(
            f"{source.path}: head_count {heads}, embedding_length {hidden}; damaged file"
        )
    if "token_embd.weight" not in source.tensors:
        raise FormatError(f"{source.path}: token_embd.weight is missing; fetch the file again")
    layers = source.model_value("block_count")
    if layers > len(source.tensors):
        raise FormatError(f"{source.path}: {layers} layers but {len(source.tensors)} tensors")
    return {
        "hidden_size": hidden,
        "intermediate_size": source.model_value("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": source.model_value("attention.head_count_kv", heads),
        "head_dim": source.model_value("attention.key_length", hidden // heads),
        "hidden_act": "silu",
        "max_position_embeddings": source.model_value("context_length"),
        "rms_norm_eps": source.model_value("attention.layer_norm_rms_epsilon"),
        "rope_theta": source.model_value("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(source),
        "vocab_size": source.shape("token_embd.weight")[0],
        "tie_word_embeddings": "output.weight" not in source.tensors,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": "bfloat16",
        **token_ids(source),
    }


def _llama(source: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    if source.model_value("expert_count", 0):
        raise FormatError(f"{source.path}: mixture-of-experts GGUF; use the safetensors folder")
    window = source.model_value("attention.sliding_window", 0)
    if window:
        return {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "sliding_window": window,
        }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": "blk.0.attn_q.bias" in source.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in source.tensors,
        "pretraining_tp": 1,
    }


def _qwen2(source: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "use_sliding_window": False,
    }


def _qwen3(source: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "use_sliding_window": False,
    }


def _gemma3(source: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    layers = config["num_hidden_layers"]
    pattern = source.model_value("attention.sliding_window_pattern", GEMMA3_PATTERN)
    # The 27B scales queries by hidden/heads, every other size by head_dim (as llama.cpp does).
    per_head = config["hidden_size"] // config["num_attention_heads"]
    scalar = per_head if layers == GEMMA3_27B_LAYERS else config["head_dim"]
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": scalar,
        "sliding_window": source.model_value("attention.sliding_window"),
        "layer_types": [
            "full_attention" if (layer + 1) % pattern == 0 else "sliding_attention"
            for layer in range(layers)
        ],
        "rope_theta": source.model_value("rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": source.model_value("rope.freq_base_swa", 10000.0),
        "attn_logit_softcapping": source.model_value("attn_logit_softcapping", 0.0) or None,
        "final_logit_softcapping": source.model_value("final_logit_softcapping", 0.0) or None,
    }


ARCHITECTURES: dict[str, Callable[[GgufFile, dict[str, Any]], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma3": _gemma3,
}


def _rope_scaling(source: GgufFile) -> dict[str, Any] | None:
    if "rope_freqs.weight" in source.tensors:
        return _llama3_scaling(source)
    kind = source.model_value("rope.scaling.type", "none")
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": source.model_value("rope.scaling.factor")}
    if kind == "yarn":
        original = source.model_value("rope.scaling.original_context_length")
        return {**scaling, "original_max_position_embeddings": original}
    if kind == "linear":
        return scaling
    raise FormatError(f"{source.path}: RoPE scaling {kind!r} can't be converted; use safetensors")


def _llama3_scaling(source: GgufFile) -> dict[str, Any]:
    """Llama 3.1 scaling, which GGUF keeps only as its result, one divisor per frequency.

    The released models all use low/high factors 1 and 4 over 8192 positions; the divisors are
    recomputed from those and must match, otherwise the parameters can't be recovered.
    """
    divisors = next(source.tensor("rope_freqs.weight")).tolist()
    theta = source.model_value("rope.freq_base", 10000.0)
    scaling = {
        "rope_type": "llama3",
        "factor": round(max(divisors), 4),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected = llama3_divisors(2 * len(divisors), theta, scaling["factor"])
    if any(abs(a - b) > 1e-3 * b for a, b in zip(divisors, expected, strict=True)):
        raise FormatError(
            f"{source.path}: rope_freqs.weight isn't Llama 3 scaling; use safetensors"
        )
    return scaling


def llama3_divisors(dim: int, theta: float, factor: float) -> list[float]:
    """Divisor of each of `dim / 2` rotary frequencies under Llama 3.1 scaling (1, 4, 8192)."""
    divisors = []
    for index in range(0, dim, 2):
        wavelength = 2 * math.pi * theta ** (index / dim)
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / 3
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return divisors
