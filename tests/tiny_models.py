"""Tiny random models of every architecture, made on the fly from transformers configs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: 256 bytes and 4 special tokens, padded so that every linear's out_features divides by 32.
VOCAB_SIZE = 288

_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 257,
    "eos_token_id": 258,
    "pad_token_id": 258,
}
_SWITCHES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    # 7 layers: the last of every six is a full layer.
    "gemma3_text": {"num_hidden_layers": 7, "sliding_window": 24, "query_pre_attn_scalar": 16},
}


def tiny_config(arch: str, **overrides: Any) -> PretrainedConfig:
    """A transformers config of about 0.1 M parameters; GQA with 4 query and 2 KV heads."""
    return AutoConfig.for_model(arch, **(_SIZES | _SWITCHES.get(arch, {}) | overrides))


def tiny_model(arch: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Random float32 weights large enough that a mistake shows; norms and biases aren't trivial."""
    torch.manual_seed(seed)
    config = tiny_config(arch, **overrides)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, 0, 0.15)
        else:
            around_zero = "bias" in name or arch == "gemma3_text"
            nn.init.normal_(parameter, 0 if around_zero else 1, 0.2)
    return model


def tiny_checkpoint(arch: str, folder: Path, seed: int = 0, **overrides: Any) -> Path:
    """Save a tiny model with a byte-level tokenizer as a Hugging Face folder; returns it."""
    tiny_model(arch, seed, **overrides).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    """One token a byte, then <|unk|>, <|im_start|>, <|im_end|>, <|pad|>; a ChatML template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|unk|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in specials])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|unk|>",
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def edit_json(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file; None removes a key."""
    data = json.loads(path.read_text())
    for key, value in changes.items():
        if value is None:
            data.pop(key, None)
        else:
            data[key] = value
    path.write_text(json.dumps(data))
