"""A decoder as the C++ library takes it: packed from a WeightSource, found again in an arena."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qdeploy.kv.config import KVCacheConfig
from qdeploy.models.spec import DecoderSpec
from qdeploy.progress import Progress
from qdeploy.quantization.scheme import QuantizedLinear
from qdeploy.runtime.executors.tile_arena import Arena, ArenaWriter, Tiles
from qdeploy.runtime.executors.weights import WeightSource, norm_sizes
from qdeploy_kernels.cpu import abi
from qdeploy_kernels.cpu.abi import Activation, ActMode, Kind
from qdeploy_kernels.cpu.fusion import pack_matrix
from qdeploy_kernels.cpu.tiles import TILE_ROWS, TileMatrix

log = logging.getLogger("qdeploy")

#: Matrices of a layer: the linears whose rows each of them joins.
MATRICES = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
#: Norms of a layer by their names in the checkpoint.
_NORMS = {
    "input_layernorm": "input_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "pre_feedforward_norm",
    "post_feedforward_layernorm": "post_feedforward_norm",
    "self_attn.q_norm": "q_norm",
    "self_attn.k_norm": "k_norm",
}
_BLOCK_SIZES = (16, 1024)
_MAX_HEAD_DIM = 1024


def unsupported(spec: DecoderSpec, kv: KVCacheConfig) -> str | None:
    """What of a model or KV policy the library can't run, with a next step; None if it runs."""
    low, high = _BLOCK_SIZES
    if spec.head_dim % 16 or spec.head_dim > _MAX_HEAD_DIM:
        fault = f"head_dim {spec.head_dim}, which is no multiple of 16 up to {_MAX_HEAD_DIM}"
    elif not low <= kv.block_size <= high:
        fault = f"block_size {kv.block_size}, which is not within {low} … {high}"
    else:
        return None
    return f"backend cpu can't run {fault}; use --backend reference"


def pack_model(source: WeightSource, spec: DecoderSpec, arena: ArenaWriter, show: Progress) -> None:
    """Write a model's matrices and norms, one layer in memory at a time; raises FormatError."""
    with show.task("pack weights for the CPU", spec.num_layers) as task:
        for layer in range(spec.num_layers):
            for name, linears in MATRICES.items():
                weights, biases = zip(*(source.linear(layer, n) for n in linears), strict=True)
                matrix = pack_matrix(weights, biases, interleave=name == "gate_up")
                _warn_if_dense(f"layer {layer} {name}", weights, matrix)
                arena.add_matrix(f"{layer}.{name}", matrix)
            for name in norm_sizes(spec):
                arena.add(f"{layer}.{name}", source.norm(layer, name).numpy())
            task.advance(note=f"layer {layer}")
        arena.add("norm", source.final_norm().numpy())
        arena.add_matrix("embedding", pack_matrix([source.embedding()], [None], permutable=False))
        head = source.head()
        if head is not None:
            arena.add_matrix("head", pack_matrix([head], [None]))


def _warn_if_dense(name: str, weights: Sequence[object], matrix: TileMatrix) -> None:
    """Say that a quantized matrix is held dense: exact, but slower and several times as large."""
    if matrix.kind in (Kind.BF16, Kind.F32) and any(
        isinstance(w, QuantizedLinear) for w in weights
    ):
        log.warning(
            "%s is held as %s: its groups, act-order or scales fit no packed layout of backend cpu",
            name,
            matrix.kind.name,
        )


class ModelData:
    """qd_model over an arena's tiles, with everything that its pointers point to.

    Raises ArenaError when the arena isn't this model's.
    """

    def __init__(self, tiles: Tiles, spec: DecoderSpec, act: ActMode) -> None:
        self.tiles, self.act, self._spec = tiles, act, spec
        self._kept: list[Any] = [tiles]
        shapes = _matrix_shapes(spec)
        table = (spec.vocab_size, spec.hidden_size)
        ropes = list(dict.fromkeys(spec.rope))
        self.layers = (abi.Layer * spec.num_layers)()
        for index, layer in enumerate(self.layers):
            for name, shape in shapes.items():
                setattr(layer, name, self._matrix(f"{index}.{name}", *shape))
            for name, size in norm_sizes(spec).items():
                setattr(layer, _NORMS[name], self._vector(f"{index}.{name}", size))
            layer.window = spec.sliding_windows[index] or 0
            layer.rope = ropes.index(spec.rope[index])
        embedding = self._matrix("embedding", *table)
        frequencies = [rope.inverse_frequencies(spec.head_dim).numpy() for rope in ropes]
        self.struct = abi.Model(
            num_layers=spec.num_layers,
            hidden=spec.hidden_size,
            inner=spec.intermediate_size,
            q_heads=spec.num_q_heads,
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            vocab=spec.vocab_size,
            activation=Activation[spec.activation.upper()],
            sandwich_norms=spec.sandwich_norms,
            act_mode=act,
            num_ropes=len(ropes),
            norm_eps=spec.norm_eps,
            attention_scale=spec.attention_scale,
            embedding_multiplier=spec.embedding_multiplier,
            attention_cap=spec.attention_soft_cap or 0,
            logit_cap=spec.logit_soft_cap or 0,
            inverse_frequencies=self._keep(np.stack(frequencies).astype(np.float32)),
            rope_scales=self._keep(np.array([r.attention_factor for r in ropes], np.float32)),
            norm=self._vector("norm", spec.hidden_size),
            layers=ctypes.cast(self.layers, ctypes.POINTER(abi.Layer)),
            embedding=embedding,
            head=self._matrix("head", *table) if tiles.has("head") else embedding,
        )

    @property
    def activations(self) -> str:
        """What activations of the layers' quantized weights are multiplied as: `int8` or `fp32`,
        `bf16` where all are float8 and the mode is int8.
        """
        kinds = {getattr(layer, name).kind for layer in self.layers for name in MATRICES}
        floats = Kind.FP8 in kinds and not kinds & {Kind.W4, Kind.W8}
        return "bf16" if floats and self.act is ActMode.INT8 else self.act.name.lower()

    def step_bytes(self) -> int:
        """Bytes of the matrices that a step reads whole: all but an untied embedding's."""
        layers = [getattr(layer, name) for layer in self.layers for name in MATRICES]
        matrices = [*layers, self.struct.head]
        return sum(m.tile_bytes * -(-m.rows // TILE_ROWS) for m in matrices)

    def _matrix(self, name: str, rows: int, cols: int) -> abi.Matrix:
        matrix: TileMatrix = self.tiles.matrix(name, rows, cols)
        self._kept.append(matrix)
        return matrix.struct()

    def _vector(self, name: str, size: int) -> int:
        return self._keep(self.tiles.array(name, "float32", (size,)))

    def _keep(self, array: NDArray[np.float32]) -> int:
        """The array's address, and the array alive."""
        self._kept.append(array)
        return array.ctypes.data


def checker(spec: DecoderSpec) -> Callable[[Arena], None]:
    """A function that raises ArenaError for an arena that isn't of the model."""
    return lambda arena: _check(arena, spec)


def _check(arena: Arena, spec: DecoderSpec) -> None:
    ModelData(arena, spec, ActMode.FP32)


def _matrix_shapes(spec: DecoderSpec) -> dict[str, tuple[int, int]]:
    """[rows, cols] of a layer's matrices."""
    q = spec.num_q_heads * spec.head_dim
    kv = spec.num_kv_heads * spec.head_dim
    hidden, inner = spec.hidden_size, spec.intermediate_size
    return {
        "qkv": (q + 2 * kv, hidden),
        "o": (hidden, q),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
    }
