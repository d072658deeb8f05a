"""Smoothing groups as data, and folding their scales away (AWQ, SmoothQuant).

A group multiplies the input columns of some linears by s and divides the module that makes their
input by s. The layer computes the same function, but is kinder to quantize.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qdeploy.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class SmoothingGroup:
    """Names are relative to the decoder layer.

    source: the norm or linear whose output is divided by s
    balance: linears that read it
    offset: the norm multiplies by 1 + w (Gemma), not by w
    per_kv_head: source has a row per KV head, balance a column per query head (GQA)
    """

    source: str
    balance: tuple[str, ...]
    offset: bool = False
    per_kv_head: bool = False


def _norm(source: str, balance: tuple[str, ...], *, offset: bool = False) -> SmoothingGroup:
    return SmoothingGroup(source=source, balance=balance, offset=offset)


_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
_OUT = SmoothingGroup(
    source="self_attn.v_proj",
    balance=("self_attn.o_proj",),
    per_kv_head=True,
)
_DOWN = SmoothingGroup(source="mlp.up_proj", balance=("mlp.down_proj",))
_ATTENTION_NORM, _MLP_NORM = "input_layernorm", "post_attention_layernorm"


def _pre_norm(*, mlp_norm: str = _MLP_NORM, offset: bool = False) -> tuple[SmoothingGroup, ...]:
    """A norm before attention, another before the MLP."""
    return (
        _norm(_ATTENTION_NORM, _QKV, offset=offset),
        _OUT,
        _norm(mlp_norm, _GATE_UP, offset=offset),
        _DOWN,
    )


_LLAMA = _pre_norm()
#: Norms only behind attention and MLP: nothing can be folded into what comes before them.
_POST_NORM = (_OUT, _DOWN)
_BEFORE_MLP = "pre_feedforward_layernorm"
GROUPS: Mapping[str, tuple[SmoothingGroup, ...]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "smollm3": _LLAMA,
    "granite": _LLAMA,
    "gemma": _pre_norm(offset=True),
    "gemma2": _pre_norm(mlp_norm=_BEFORE_MLP, offset=True),
    # q_norm and k_norm make smoothing of q and k worse than none (llm-compressor 2522).
    "gemma3_text": (_OUT, _norm(_BEFORE_MLP, _GATE_UP, offset=True), _DOWN),
    "olmo2": _POST_NORM,
    "exaone4": _POST_NORM,
    # Attention and MLP side by side behind one norm.
    "cohere": (_norm(_ATTENTION_NORM, (*_QKV, *_GATE_UP)), _OUT, _DOWN),
    # Fused projections: a slice of one can't be divided on its own.
    "phi3": (
        _norm(_ATTENTION_NORM, ("self_attn.qkv_proj",)),
        _norm(_MLP_NORM, ("mlp.gate_up_proj",)),
    ),
}


def smoothing_groups(
    model_type: str, instead: str = "use --method gptq"
) -> tuple[SmoothingGroup, ...]:
    """The groups of an architecture; UsageError, saying what to do instead, when none are known."""
    if model_type not in GROUPS:
        raise UsageError(
            f"no smoothing groups are known for model type {model_type!r} "
            f"(but for {', '.join(GROUPS)}); {instead}"
        )
    return GROUPS[model_type]


def share_heads(values: Tensor, group: SmoothingGroup, source_rows: int, head_dim: int) -> Tensor:
    """Average per-column statistics [in] over the query heads of a KV head: [source_rows]."""
    if not group.per_kv_head or values.numel() == source_rows:
        return values
    return values.view(source_rows // head_dim, -1, head_dim).mean(1).reshape(-1)


def expand_heads(scales: Tensor, columns: int, head_dim: int) -> Tensor:
    """Repeat scales [source_rows] for every query head of the KV head: [columns]."""
    if scales.numel() == columns:
        return scales
    heads = scales.view(-1, 1, head_dim)
    return heads.expand(-1, columns // scales.numel(), head_dim).reshape(-1)


@torch.no_grad()
def fold(
    layer: nn.Module,
    group: SmoothingGroup,
    scales: Tensor,
    head_dim: int,
    store_dtype: torch.dtype,
) -> Tensor:
    """Divide the source by scales [source_rows], multiply the balance columns; in place.

    A norm's new weight is rounded to its dtype on disk first, and the columns take up exactly
    what the rounded one gives: the fold then adds no error to a bfloat16 checkpoint. Returns the
    scales of the balance columns, [in].
    """
    source = layer.get_submodule(group.source)
    if isinstance(source, nn.Linear):
        source.weight.div_(scales.unsqueeze(1))
        if source.bias is not None:
            source.bias.div_(scales)
    else:
        scales = _fold_norm(source, scales, 1.0 if group.offset else 0.0, store_dtype)
    first = layer.get_submodule(group.balance[0])
    assert isinstance(first, nn.Linear)
    columns = expand_heads(scales, first.in_features, head_dim)
    for name in group.balance:
        linear = layer.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        linear.weight.mul_(columns)
    return columns


def _fold_norm(norm: nn.Module, scales: Tensor, offset: float, dtype: torch.dtype) -> Tensor:
    """New weight (offset + w) / s − offset as stored; returns (offset + w) / (offset + w')."""
    weight = norm.weight
    assert isinstance(weight, Tensor)
    old = weight + offset
    stored = (old / scales - offset).to(dtype).float()
    effective = old / (stored + offset)
    # A zero or overflowing factor can't be scaled: leave such a feature alone.
    usable = effective.isfinite() & (effective > 0)
    stored = torch.where(usable, stored, weight)
    effective = torch.where(usable, effective, torch.ones_like(effective))
    if getattr(norm, "bias", None) is not None:
        bias = norm.bias
        assert isinstance(bias, Tensor)
        bias.div_(effective)
    weight.copy_(stored)
    return effective
