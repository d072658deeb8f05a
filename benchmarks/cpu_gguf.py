"""A Llama checkpoint as a bfloat16 GGUF, which llama.cpp's own tool then rounds to Q4_0."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors import safe_open
from torch import Tensor

_LAYER_TENSORS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TENSORS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def write_gguf(folder: Path, out: Path) -> None:
    """Write the Hugging Face folder of a Llama model with a byte-level BPE tokenizer to `out`."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(out, "llama")
    _write_config(writer, config)
    _write_tokenizer(writer, folder, config)
    for shard in sorted(folder.glob("*.safetensors")):
        with safe_open(shard, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                _write_tensor(writer, name, file.get_tensor(name), config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(_rope_theta(config))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])


def _rope_theta(config: dict[str, Any]) -> float:
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    return float(theta)


def _write_tokenizer(writer: gguf.GGUFWriter, folder: Path, config: dict[str, Any]) -> None:
    data = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    size = config["vocab_size"]
    tokens = [f"[PAD{i}]" for i in range(size)]
    types = [gguf.TokenType.UNUSED] * size
    for text, index in data["model"]["vocab"].items():
        tokens[index], types[index] = text, gguf.TokenType.NORMAL
    for added in data["added_tokens"]:
        tokens[added["id"]], types[added["id"]] = added["content"], gguf.TokenType.CONTROL
    merges = data["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])


def _write_tensor(
    writer: gguf.GGUFWriter, name: str, tensor: Tensor, config: dict[str, Any]
) -> None:
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    for linear, key in heads.items():
        if f".{linear}." in name:
            tensor = _interleave(tensor, config[key])
    target = _gguf_name(name)
    if tensor.dim() == 1:
        writer.add_tensor(target, tensor.float().numpy())
        return
    raw = tensor.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
    writer.add_tensor(target, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)


def _interleave(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of each head from halves to pairs, as llama.cpp's RoPE has them."""
    rows = weight.shape[0] // num_heads
    pairs = weight.view(num_heads, 2, rows // 2, -1).transpose(1, 2)
    return pairs.reshape(weight.shape)


def _gguf_name(name: str) -> str:
    if name in _TENSORS:
        return _TENSORS[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_LAYER_TENSORS[rest.removesuffix('.weight')]}.weight"
