"""A decoder's weights from a checkpoint of any format: as stored, or all in float32."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qdeploy.errors import FormatError
from qdeploy.formats.checkpoint import Checkpoint
from qdeploy.models.spec import DecoderSpec
from qdeploy.progress import Progress
from qdeploy.quantization.embeddings import quantize_table
from qdeploy.quantization.scheme import QuantizedLinear

#: A weight matrix in its stored form.
Stored = QuantizedLinear | Tensor


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


class WeightSource:
    """A checkpoint's tensors as one decoder has them, each read, checked and returned when asked.

    Weights come in their stored form: a QuantizedLinear (its bias beside it, not in it) or a dense
    tensor [out, in] of the file's dtype, which may be the file's own mapping: copy, don't write.
    The artifact's embeddings policy is applied here, so that every executor serves the same table:
    a dense embedding or head then comes quantized, once for both when they are tied.
    Every method raises FormatError that names the tensor when one is missing, of another shape,
    or holds a non-finite number.
    """

    def __init__(self, checkpoint: Checkpoint, spec: DecoderSpec) -> None:
        self._checkpoint, self._spec = checkpoint, spec
        self._shapes = {name: (shape, bias) for name, shape, bias in linear_shapes(spec)}
        self._norms = norm_sizes(spec)
        self._table = (spec.vocab_size, spec.hidden_size)
        manifest = checkpoint.manifest
        policy = manifest.embeddings if manifest is not None else None
        self._table_scheme = policy.scheme() if policy is not None else None

    def linear(self, layer: int, name: str) -> tuple[Stored, Tensor | None]:
        """A linear of `linear_shapes` and its bias, float32 [out] or None."""
        module = f"model.layers.{layer}.{name}"
        shape, has_bias = self._shapes[name]
        bias = _bias(self._checkpoint, f"{module}.bias", shape[0], has_bias)
        return self._matrix(module, shape), bias

    def norm(self, layer: int, name: str) -> Tensor:
        """A norm of `norm_sizes`, float32, with the offset added (1 + w)."""
        full = f"model.layers.{layer}.{name}.weight"
        return _vector(self._checkpoint, full, self._norms[name]) + self._spec.norm_offset

    def final_norm(self) -> Tensor:
        """The norm before the head, float32 [hidden], with the offset added."""
        size = self._spec.hidden_size
        return _vector(self._checkpoint, "model.norm.weight", size) + self._spec.norm_offset

    def embedding(self) -> Stored:
        """The table [vocab, hidden] that tokens are looked up in."""
        return self._rounded(self._matrix(_EMBEDDING, self._table))

    def head(self) -> Stored | None:
        """The matrix [vocab, hidden] of the logits; None when it is the embedding.

        A stored head that differs wins over the config's tie, as in transformers 5; a packed one
        always counts.
        """
        stored = any(self._checkpoint.has(f"lm_head.{name}") for name in _MAIN_TENSORS)
        if self._spec.tied_embeddings and not stored:
            return None
        head = self._matrix("lm_head", self._table)
        if _same(head, self._matrix(_EMBEDDING, self._table)):
            return None
        return self._rounded(head)

    def _rounded(self, table: Stored) -> Stored:
        if self._table_scheme is None or not isinstance(table, Tensor):
            return table
        return quantize_table(table, self._table_scheme)

    def _matrix(self, module: str, shape: tuple[int, int]) -> Stored:
        weight = self._checkpoint.linear(module)
        if isinstance(weight, Tensor):
            return _checked(weight, f"{module}.weight", shape)
        _check_shape(weight.shape, f"{module}.weight", shape)
        _check_finite(weight.scales.float() * weight.scheme.max_value, f"{module}.scales")
        return replace(weight, bias=None)


_EMBEDDING = "model.embed_tokens"
#: How the formats name a linear's main tensor.
_MAIN_TENSORS = ("weight", "qweight", "weight_packed")


def load_weights(checkpoint: Checkpoint, spec: DecoderSpec, progress: Progress) -> DecoderWeights:
    """Read and dequantize everything; raises FormatError as WeightSource does."""
    source = WeightSource(checkpoint, spec)
    with progress.task("load weights", spec.num_layers) as task:
        layers = []
        for index in range(spec.num_layers):
            layers.append(_load_layer(source, spec, index))
            task.advance(note=f"layer {index}")
    embedding, head = dense(source.embedding()), source.head()
    return DecoderWeights(
        embedding=embedding,
        layers=layers,
        norm=source.final_norm(),
        head=embedding if head is None else dense(head),
    )


def dense(weight: Stored) -> Tensor:
    """The weight [out, in] as an own float32 tensor, dequantized if it is quantized."""
    return _own(weight) if isinstance(weight, Tensor) else weight.dequantize()


def _load_layer(source: WeightSource, spec: DecoderSpec, index: int) -> LayerWeights:
    linears = {}
    for name, _, _ in linear_shapes(spec):
        weight, bias = source.linear(index, name)
        linears[name] = Linear(dense(weight), bias)
    norms = {name: source.norm(index, name) for name in norm_sizes(spec)}
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


def _same(head: Stored, embedding: Stored) -> bool:
    """Whether two dense tables hold the same numbers in the same dtype."""
    if not isinstance(head, Tensor) or not isinstance(embedding, Tensor):
        return False
    return head.dtype == embedding.dtype and torch.equal(head, embedding)


def _vector(checkpoint: Checkpoint, name: str, size: int) -> Tensor:
    return _own(_checked(checkpoint.tensor(name), name, (size,)))


def _bias(checkpoint: Checkpoint, name: str, size: int, expected: bool) -> Tensor | None:
    """AutoGPTQ writes biases of zeros where there are none; any other is one too many."""
    if not expected and not checkpoint.has(name):
        return None
    bias = _vector(checkpoint, name, size)
    if not expected and bool(bias.any()):
        raise FormatError(f"{name} is stored, but config.json says there is no such bias")
    return bias if expected else None


def _checked(tensor: Tensor, name: str, shape: tuple[int, ...]) -> Tensor:
    _check_shape(tuple(tensor.shape), name, shape)
    _check_finite(tensor, name)
    return tensor


def _check_shape(found: tuple[int, ...], name: str, shape: tuple[int, ...]) -> None:
    if found != shape:
        raise FormatError(f"{name} has shape {list(found)}; config.json says {list(shape)}")


def _check_finite(tensor: Tensor, name: str) -> None:
    if not bool(torch.isfinite(tensor).all()):
        raise FormatError(f"{name} holds NaN or infinite weights; quantize the model again")


def _own(tensor: Tensor) -> Tensor:
    """An own float32 copy: a file's mapping isn't aligned as kernels like it."""
    return tensor.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
