"""Tiny GGUF files made the way llama.cpp's converter makes them, from a random transformers model.

Names come from the gguf package's own map, so that the reader under test isn't its own oracle.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

COMMON = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "num_hidden_layers": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
MODELS: dict[str, tuple[type, type, str, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, "llama", {"rope_theta": 50000.0}),
    "mistral": (MistralConfig, MistralForCausalLM, "llama", {"sliding_window": 16}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, "qwen2", {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, "qwen3", {"head_dim": 32}),
    "gemma3": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        "gemma3",
        {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8, "num_hidden_layers": 7},
    ),
}


def tiny_model(name: str, **overrides: Any) -> PreTrainedModel:
    """A random model whose weights are exact in bfloat16, norms and biases included."""
    config_class, model_class, _, extra = MODELS[name]
    torch.manual_seed(7)
    config = config_class(**{**COMMON, **extra, **overrides})
    config._attn_implementation = "eager"
    model = model_class(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.copy_(torch.randint(-40, 40, parameter.shape) / 128)
            parameter.copy_(parameter.to(torch.bfloat16).float())
    return model


def byte_tokens() -> list[str]:
    """Three control tokens, the 256 bytes of byte-level BPE, a few merged tokens."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return ["<s>", "</s>", "<pad>", *bytes_to_unicode().values(), "he", "ll", "hell", "hello"]


MERGES = ["h e", "l l", "he ll", "hell o"]


def write_gguf(path: Path, name: str, model: PreTrainedModel, **fields: Any) -> Path:
    """Write `model` as `path`; `fields` override tokenizer keys (`pre`, `add_bos_token`, …)."""
    arch = MODELS[name][2]
    config = model.config
    writer = gguf.GGUFWriter(str(path), arch)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if name in ("mistral", "gemma3"):
        writer.add_sliding_window(config.sliding_window)
    add_tokenizer(writer, config.vocab_size, fields)
    for tensor_name, tensor in gguf_tensors(name, model).items():
        writer.add_tensor(tensor_name, tensor)
    return finish(writer)


def add_tokenizer(writer: gguf.GGUFWriter, vocab_size: int, fields: dict[str, Any]) -> None:
    """A byte-level tokenizer padded to `vocab_size` with unused rows."""
    tokens = byte_tokens()
    kinds = [3] * 3 + [1] * (len(tokens) - 3) + [5] * (vocab_size - len(tokens))
    tokens += [f"[PAD{index}]" for index in range(len(tokens), vocab_size)]
    writer.add_tokenizer_model(fields.get("kind", "gpt2"))
    writer.add_tokenizer_pre(fields.get("pre", "qwen2"))
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(fields.get("add_bos_token", True))
    writer.add_add_eos_token(fields.get("add_eos_token", False))
    if "chat_template" in fields:
        writer.add_chat_template(fields["chat_template"])


def finish(writer: gguf.GGUFWriter) -> Path:
    """Write everything out and close."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(writer.path)


def gguf_tensors(name: str, model: PreTrainedModel) -> dict[str, np.ndarray]:
    """GGUF name → float32 array, with llama's q/k permutation and gemma's norm shift applied."""
    arch = MODELS[name][2]
    config = model.config
    key = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == arch)
    names = gguf.get_tensor_name_map(key, config.num_hidden_layers)
    result = {}
    for hf_name, tensor in model.state_dict().items():
        if hf_name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        if arch == "llama" and ".q_proj." in hf_name:
            values = permute(values, config.num_attention_heads)
        if arch == "llama" and ".k_proj." in hf_name:
            values = permute(values, config.num_key_value_heads)
        if arch == "gemma3" and hf_name.endswith("norm.weight"):
            values = values + 1
        gguf_name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, hf_name
        result[gguf_name] = np.ascontiguousarray(values)
    return result


def permute(values: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's LlamaModel.permute (convert_hf_to_gguf.py)."""
    split = values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, *values.shape[1:])
    return split.swapaxes(1, 2).reshape(values.shape)
