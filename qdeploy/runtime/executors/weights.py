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


#: How the formats name a linear's main tensor.
_HEAD_TENSORS = ("weight", "qweight", "weight_packed")


def load_weights(checkpoint: Checkpoint, spec: DecoderSpec, progress: Progress) -> DecoderWeights:
    """Read and dequantize everything.

    Raises FormatError that names the tensor when one is missing, of another shape, or holds a
    non-finite number.
    """
    with progress.task("load weights", spec.num_layers) as task:
        layers = []
        for index in range(spec.num_layers):
            layers.append(_load_layer(checkpoint, spec, f"model.layers.{index}"))
            task.advance(note=f"layer {index}")
    shape = (spec.vocab_size, spec.hidden_size)
    embedding = _matrix(checkpoint, "model.embed_tokens", shape)
    norm = _vector(checkpoint, "model.norm.weight", spec.hidden_size) + spec.norm_offset
    head = _load_head(checkpoint, spec, embedding)
    return DecoderWeights(embedding=embedding, layers=layers, norm=norm, head=head)


def _load_head(checkpoint: Checkpoint, spec: DecoderSpec, embedding: Tensor) -> Tensor:
    """The embedding when tied. A stored head that differs wins over the config, as in
    transformers 5; a packed one always counts.
    """
    stored = any(checkpoint.has(f"lm_head.{name}") for name in _HEAD_TENSORS)
    if spec.tied_embeddings and not stored:
        return embedding
    head = _matrix(checkpoint, "lm_head", (spec.vocab_size, spec.hidden_size))
    return embedding if torch.equal(head, embedding) else head


def _load_layer(checkpoint: Checkpoint, spec: DecoderSpec, prefix: str) -> LayerWeights:
    linears = {
        name: Linear(
            _matrix(checkpoint, f"{prefix}.{name}", shape),
            _bias(checkpoint, f"{prefix}.{name}.bias", shape[0], has_bias),
        )
        for name, shape, has_bias in linear_shapes(spec)
    }
    norms = {
        name: _vector(checkpoint, f"{prefix}.{name}.weight", size) + spec.norm_offset
        for name, size in norm_sizes(spec).items()
    }
    return LayerWeights(linears=linears, norms=norms)


def linear_shapes(spec: DecoderSpec) -> list[tuple[str, tuple[int, int], bool]]:
    """(name, (out_features, in_features), has a bias) of one layer's linears."""
    q, kv = spec.num_q_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    hidden, inner = spec.hidden_size, spec.intermediate_size
    return [
        ("self_attn.q_proj", (q, hidden), spec.qkv_bias),
        ("self_attn.k_proj", (kv, hidden), spec.qkv_bias),
        ("self_attn.v_proj", (kv, hidden), spec.qkv_bias),
        ("self_attn.o_proj", (hidden, q), spec.o_bias),
        ("mlp.gate_proj", (inner, hidden), spec.mlp_bias),
        ("mlp.up_proj", (inner, hidden), spec.mlp_bias),
        ("mlp.down_proj", (hidden, inner), spec.mlp_bias),
    ]


def norm_sizes(spec: DecoderSpec) -> dict[str, int]:
    """Norms of one layer, by their names in the checkpoint, and their sizes."""
    names = ["input_layernorm", "post_attention_layernorm"]
    if spec.sandwich_norms:
        names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    sizes = dict.fromkeys(names, spec.hidden_size)
    if spec.qk_norm:
        sizes |= {"self_attn.q_norm": spec.head_dim, "self_attn.k_norm": spec.head_dim}
    return sizes


def _matrix(checkpoint: Checkpoint, module: str, shape: tuple[int, int]) -> Tensor:
    return _checked(checkpoint.weight(module), f"{module}.weight", shape)


def _vector(checkpoint: Checkpoint, name: str, size: int) -> Tensor:
    return _checked(checkpoint.tensor(name), name, (size,))


def _bias(checkpoint: Checkpoint, name: str, size: int, expected: bool) -> Tensor | None:
    """AutoGPTQ writes biases of zeros where there are none; any other is one too many."""
    if not expected and not checkpoint.has(name):
        return None
    bias = _vector(checkpoint, name, size)
    if not expected and bool(bias.any()):
        raise FormatError(f"{name} is stored, but config.json says there is no such bias")
    return bias if expected else None


def _checked(tensor: Tensor, name: str, shape: tuple[int, ...]) -> Tensor:
    """The tensor as an own float32 copy: a file's mapping isn't aligned as kernels like it."""
    if tuple(tensor.shape) != shape:
        raise FormatError(f"{name} has shape {list(tensor.shape)}; config.json says {list(shape)}")
    if not bool(torch.isfinite(tensor).all()):
        raise FormatError(f"{name} holds NaN or infinite weights; quantize the model again")
    return tensor.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
