"""A decoder's weights as float32 tensors, read from a checkpoint of any format."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qdeploy.errors import FormatError
from qdeploy.formats.checkpoint import Checkpoint
from qdeploy.models.spec import DecoderSpec
from qdeploy.progress import Progress


@dataclass(frozen=True, slots=True)
class Linear:
    """weight [out, in] and bias [out] or None, float32."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One decoder layer; norms [hidden] or [head_dim] hold the offset already (1 + w)."""

    linears: dict[str, Linear]
    norms: dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """The whole decoder; `head` is `embedding` itself when they are tied."""

    embedding: Tensor
    layers: list[LayerWeights]
    norm: Tensor
    head: Tensor


LINEARS = {
    "self_attn.q_proj": "qkv_bias",
    "self_attn.k_proj": "qkv_bias",
    "self_attn.v_proj": "qkv_bias",
    "self_attn.o_proj": "o_bias",
    "mlp.gate_proj": "mlp_bias",
    "mlp.up_proj": "mlp_bias",
    "mlp.down_proj": "mlp_bias",
}


def load_weights(
    checkpoint: Checkpoint, spec: DecoderSpec, progress: Progress
) -> DecoderWeights:
    """Read and dequantize everything; a non-finite weight is a FormatError that names it."""
    with progress.task("load weights", spec.num_layers) as task:
        layers = []
        for index in range(spec.num_layers):
            layers.append(_load_layer(checkpoint, spec, f"model.layers.{index}"))
            task.advance(note=f"layer {index}")
    embedding = _finite(checkpoint, "model.embed_tokens.weight")
    tied = spec.tied_embeddings or not checkpoint.has("lm_head.weight")
    return DecoderWeights(
        embedding=embedding,
        layers=layers,
        norm=_finite(checkpoint, "model.norm.weight") + spec.norm_offset,
        head=embedding if tied else _finite(checkpoint, "lm_head.weight"),
    )


def _load_layer(checkpoint: Checkpoint, spec: DecoderSpec, prefix: str) -> LayerWeights:
    linears = {}
    for name, switch in LINEARS.items():
        module = f"{prefix}.{name}"
        weight = checkpoint.weight(module).float()
        _check_finite(weight, module)
        bias = _finite(checkpoint, f"{module}.bias") if getattr(spec, switch) else None
        linears[name] = Linear(weight, bias)
    norms = {
        name: _finite(checkpoint, f"{prefix}.{name}.weight") + spec.norm_offset
        for name in norm_names(spec)
    }
    return LayerWeights(linears=linears, norms=norms)


def norm_names(spec: DecoderSpec) -> list[str]:
    """Norms of one layer, by their names in the checkpoint."""
    names = ["input_layernorm", "post_attention_layernorm"]
    if spec.sandwich_norms:
        names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    if spec.qk_norm:
        names += ["self_attn.q_norm", "self_attn.k_norm"]
    return names


def _finite(checkpoint: Checkpoint, name: str) -> Tensor:
    tensor = checkpoint.tensor(name).float()
    _check_finite(tensor, name)
    return tensor


def _check_finite(tensor: Tensor, name: str) -> None:
    if not bool(torch.isfinite(tensor).all()):
        raise FormatError(f"{name} holds NaN or infinite weights; quantize the model again")
