"""A copy of a CPU model in fewer bits, for drafting. What has few bits already is shared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from qdeploy.kv.config import KVCacheConfig
from qdeploy.progress import Progress
from qdeploy.quantization.embeddings import quantize_table
from qdeploy.quantization.scheme import QuantizedLinear, QuantScheme
from qdeploy.runtime.executors.cpu import CpuExecutor, CpuModel
from qdeploy.runtime.executors.cpu_model import MATRICES, ModelData
from qdeploy.runtime.executors.tile_arena import Arena, ArenaWriter, Tiles
from qdeploy.runtime.executors.tile_cache import pack_in_memory
from qdeploy.runtime.executors.weights import Stored, WeightSource, dense
from qdeploy_kernels.cpu.fusion import pack_matrix
from qdeploy_kernels.cpu.tiles import TileMatrix

BITS = 4
#: Smaller than usual: on SmolLM2, greedy, 0.74 of the drafts are right with groups of 32, and 0.63
#: with groups of 64, whose tiles are a twentieth smaller.
_GROUP_SIZES = (32, 16, 8)


@dataclass(frozen=True, slots=True)
class OverlaidTiles:
    """Tiles of `below`, but for the matrices that `above` has."""

    below: Tiles
    above: Arena

    def has(self, name: str) -> bool:
        """Whether there is an array or matrix of that name."""
        return self.above.has(name) or self.below.has(name)

    def array(self, name: str, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
        """As Arena.array; norms aren't replaced."""
        return self.below.array(name, dtype, shape)

    def matrix(self, name: str, rows: int, cols: int) -> TileMatrix:
        """As Arena.matrix."""
        tiles = self.above if self.above.has(name) else self.below
        return tiles.matrix(name, rows, cols)


def load_low_bit_copy(
    executor: CpuExecutor, source: WeightSource, kv_config: KVCacheConfig, progress: Progress
) -> CpuExecutor:
    """An executor whose matrices of more than 4 bits are rounded to 4, in groups, to nearest.

    source: the checkpoint that `executor` was loaded from. The copy is packed in memory; with
    nothing to round, all weights are shared.
    """
    model = executor.model
    rounded = list[str]()
    above = pack_in_memory(lambda writer: rounded.extend(_pack(source, model, writer, progress)))
    if not rounded:
        return executor.with_kv(kv_config)
    data = ModelData(OverlaidTiles(model.data.tiles, above), model.spec, model.data.act)
    return CpuExecutor(CpuModel(model.library, data, model.spec, model.threads), kv_config)


def _pack(
    source: WeightSource, model: CpuModel, writer: ArenaWriter, progress: Progress
) -> list[str]:
    """Write the matrices that get smaller; returns their names."""
    found: list[str] = []
    with progress.task("pack the draft's 4-bit weights", model.spec.num_layers) as task:
        for layer in range(model.spec.num_layers):
            for name, linears in MATRICES.items():
                weights, biases = zip(*(source.linear(layer, n) for n in linears), strict=True)
                if any(map(_is_large, weights)):
                    parts = [_low_bit(weight) for weight in weights]
                    matrix = pack_matrix(parts, biases, interleave=name == "gate_up")
                    writer.add_matrix(f"{layer}.{name}", matrix)
                    found.append(f"{layer}.{name}")
            task.advance(note=f"layer {layer}")
    head = source.head()
    head = source.embedding() if head is None else head
    if _is_large(head):
        writer.add_matrix("head", pack_matrix([_low_bit(head)], [None]))
        found.append("head")
    return found


def _is_large(weight: Stored) -> bool:
    """Whether fewer bits would make the weight smaller, and its rows can be cut into groups."""
    if not isinstance(weight, QuantizedLinear):
        return _group_size(weight.shape[1]) > 0
    return weight.scheme.bits > BITS and _group_size(weight.shape[1]) > 0


def _low_bit(weight: Stored) -> Stored:
    if not _is_large(weight):
        return weight
    group = _group_size(weight.shape[1])
    scheme = QuantScheme(bits=BITS, group_size=group, symmetric=True)
    return quantize_table(dense(weight), scheme)


def _group_size(cols: int) -> int:
    """The largest group that divides a row; 0 for none."""
    return next((size for size in _GROUP_SIZES if cols % size == 0), 0)
