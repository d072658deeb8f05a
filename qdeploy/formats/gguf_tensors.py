"""GGUF tensors → Hugging Face names, shapes and values (bfloat16)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from qdeploy.errors import FormatError
from qdeploy.formats.gguf_file import GgufFile

GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GEMMA3_MODULES = {
    **LAYER_MODULES,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# Consumed by the config (Llama 3 RoPE scaling), no tensor of the Hugging Face model.
CONSUMED = frozenset({"rope_freqs.weight"})
_LAYER = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)")


def hf_tensors(source: GgufFile, config: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, bfloat16 tensor) in file order, one tensor in memory at a time.

    Raises FormatError before the first tensor when one is unknown, missing or of a wrong shape.
    """
    names = hf_names(source)
    _check(source, names, expected_shapes(config, frozenset(names.values())))
    for gguf_name, name in names.items():
        yield name, _convert(source, config, gguf_name, name)


def hf_names(source: GgufFile) -> dict[str, str]:
    """GGUF name → Hugging Face name of every tensor that becomes one."""
    modules = GEMMA3_MODULES if source.architecture == "gemma3" else LAYER_MODULES
    names: dict[str, str] = {}
    for name in source.tensors:
        if name in CONSUMED:
            continue
        match = _LAYER.fullmatch(name)
        if name in GLOBAL_NAMES:
            names[name] = GLOBAL_NAMES[name]
        elif match and match[2] in modules:
            names[name] = f"model.layers.{match[1]}.{modules[match[2]]}.{match[3]}"
        else:
            raise FormatError(f"{source.path}: unknown tensor {name!r} for {source.architecture}")
    return names


def expected_shapes(config: dict[str, Any], present: frozenset[str]) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor that the model needs; optional biases are listed when `present`."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        for module, shape in _layer_shapes(config).items():
            name = f"model.layers.{layer}.{module}"
            shapes[f"{name}.weight"] = shape
            qwen2_bias = config["model_type"] == "qwen2" and module in _QKV
            if qwen2_bias or f"{name}.bias" in present:
                shapes[f"{name}.bias"] = shape[:1]
    return shapes


_QKV = frozenset({"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"})


def _layer_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, head_dim = (config[k] for k in ("hidden_size", "intermediate_size", "head_dim"))
    q_out = config["num_attention_heads"] * head_dim
    kv_out = config["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (q_out, hidden),
        "self_attn.k_proj": (kv_out, hidden),
        "self_attn.v_proj": (kv_out, hidden),
        "self_attn.o_proj": (hidden, q_out),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    if config["model_type"] in ("qwen3", "gemma3_text"):
        shapes |= {"self_attn.q_norm": (head_dim,), "self_attn.k_norm": (head_dim,)}
    if config["model_type"] == "gemma3_text":
        shapes |= {"pre_feedforward_layernorm": (hidden,), "post_feedforward_layernorm": (hidden,)}
    return shapes


def _check(source: GgufFile, names: dict[str, str], shapes: dict[str, tuple[int, ...]]) -> None:
    found = {name: source.shape(gguf_name) for gguf_name, name in names.items()}
    for name in sorted(set(found) | set(shapes)):
        if name not in found:
            raise FormatError(f"{source.path}: no tensor for {name}; fetch the whole file again")
        if name not in shapes or found[name] != shapes[name]:
            wanted = shapes.get(name, "absent")
            raise FormatError(f"{source.path}: {name} has shape {found[name]}, should be {wanted}")


def _convert(source: GgufFile, config: dict[str, Any], gguf_name: str, name: str) -> Tensor:
    # Gemma stores 1 + w (its runtime multiplies by 1 + w); subtract in float32, before rounding.
    shift = -1.0 if config["model_type"] == "gemma3_text" and name.endswith("norm.weight") else 0.0
    slices = [(part + shift).to(torch.bfloat16) for part in source.tensor(gguf_name)]
    tensor = slices[0] if len(slices) == 1 else torch.cat(slices)
    if source.architecture != "llama":
        return tensor
    if ".q_proj." in name:
        return undo_rope_permutation(tensor, config["num_attention_heads"])
    if ".k_proj." in name:
        return undo_rope_permutation(tensor, config["num_key_value_heads"])
    return tensor


def undo_rope_permutation(weight: Tensor, num_heads: int) -> Tensor:
    """weight: [num_heads * head_dim, ...] with rows of each head interleaved (GGUF llama).

    llama.cpp rotates neighbouring pairs (0,1), (2,3), …; Hugging Face rotates (i, i + head_dim/2).
    Returns a contiguous copy in Hugging Face's order.
    """
    rows = weight.shape[0] // num_heads
    split = weight.reshape(num_heads, rows // 2, 2, *weight.shape[1:])
    return split.swapaxes(1, 2).reshape(weight.shape).contiguous()
