"""The reference executor: plain torch float32, the oracle of every kernel, anywhere.

It keeps P2 exactly: rows go through fixed tiles of rows (torch's matmuls give a row other
bits when the number of rows changes, but the same bits at any place of a tile of fixed height).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qdeploy.kv.config import KVCacheConfig
from qdeploy.kv.groups import KVPoolSize, kv_groups
from qdeploy.kv.pool import KVPools, open_block_bytes, sealed_block_bytes
from qdeploy.models.rope import RopeSpec
from qdeploy.models.spec import DecoderSpec
from qdeploy.runtime.batch import BlockIds, SequenceSlice, StepBatch
from qdeploy.runtime.executors.base import unallocated
from qdeploy.runtime.executors.paged_attention import SliceAttention
from qdeploy.runtime.executors.weights import DecoderWeights, LayerWeights, Linear
from qdeploy_kernels.reference.elementwise import activate, rms_norm, rope_angles, rotate, soft_cap
from qdeploy_kernels.reference.linear import pad_rows, tiled_linear


class ReferenceExecutor:
    """Implements Executor in float32; open blocks are float32."""

    name = "reference"
    act = "fp32"

    def __init__(
        self, spec: DecoderSpec, weights: DecoderWeights, kv_config: KVCacheConfig
    ) -> None:
        self.spec, self.weights, self.kv_config = spec, weights, kv_config
        self.kv_groups = kv_groups(spec, kv_config)
        self.open_block_bytes = tuple(open_block_bytes(spec, g, 4) for g in self.kv_groups)
        self.sealed_block_bytes = tuple(sealed_block_bytes(spec, g) for g in self.kv_groups)
        self._group_of = {
            layer: index for index, group in enumerate(self.kv_groups) for layer in group.layers
        }
        self._pools: tuple[KVPools, ...] = ()
        self._frequencies = {
            rope: rope.inverse_frequencies(spec.head_dim) for rope in set(spec.rope)
        }

    def allocate_kv(self, pools: Sequence[KVPoolSize]) -> None:
        """Allocate every group's pools; drops what they held before."""
        self._pools = ()
        try:
            self._pools = tuple(
                KVPools(self.spec, group, size)
                for group, size in zip(self.kv_groups, pools, strict=True)
            )
        except RuntimeError:
            raise unallocated(self, pools) from None

    def with_kv(self, kv_config: KVCacheConfig) -> ReferenceExecutor:
        """A second executor on the same weights, with its own, not yet allocated KV pools."""
        return ReferenceExecutor(self.spec, self.weights, kv_config)

    @torch.no_grad()
    def execute(self, batch: StepBatch) -> Tensor:
        """Run one step: writes the slices' K/V, returns logits [batch.num_logits, vocab]."""
        for copy in batch.copies:
            self._pools[copy.group].copy_open(copy.source, copy.target)
        ids = torch.tensor([token for piece in batch.slices for token in piece.token_ids])
        positions = torch.cat(
            [torch.arange(p.start, p.start + len(p.token_ids)) for p in batch.slices]
        )
        hidden = self._embed(ids)
        rotations = {rope: self._rotation(rope, positions) for rope in self._frequencies}
        for index, layer in enumerate(self.weights.layers):
            rotation = rotations[self.spec.rope[index]]
            hidden = self._layer(index, layer, hidden, rotation, batch)
        return self._logits(hidden, batch)

    def read_blocks(self, ids: Sequence[BlockIds]) -> NDArray[np.uint8]:
        """The packed bytes of blocks, one flat array; see Executor."""
        pairs = zip(self._pools, ids, strict=True)
        parts = [pools.read_bytes(blocks.open, blocks.sealed) for pools, blocks in pairs]
        found: NDArray[np.uint8] = torch.cat(parts).numpy()
        return found

    def write_blocks(self, ids: Sequence[BlockIds], data: NDArray[np.uint8]) -> None:
        """Put back what `read_blocks` gave."""
        rest = torch.from_numpy(data)
        for pools, blocks in zip(self._pools, ids, strict=True):
            rest = pools.write_bytes(blocks.open, blocks.sealed, rest)

    def _embed(self, ids: Tensor) -> Tensor:
        """[rows, hidden]: rows are the tokens, padded with zeros to whole tiles."""
        return pad_rows(self.weights.embedding[ids] * self.spec.embedding_multiplier)

    def _rotation(self, rope: RopeSpec, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cos and sin [num_tokens, 1, head_dim]."""
        return rope_angles(positions, self._frequencies[rope], rope.attention_factor)

    def _layer(
        self,
        index: int,
        layer: LayerWeights,
        hidden: Tensor,
        rotation: tuple[Tensor, Tensor],
        batch: StepBatch,
    ) -> Tensor:
        x = self._norm(layer, "input_layernorm", hidden)
        x = self._attention(index, layer, x, rotation, batch)
        before_mlp = "post_attention_layernorm"
        if self.spec.sandwich_norms:
            x = self._norm(layer, "post_attention_layernorm", x)
            before_mlp = "pre_feedforward_layernorm"
        hidden = hidden + x
        x = self._mlp(layer, self._norm(layer, before_mlp, hidden))
        if self.spec.sandwich_norms:
            x = self._norm(layer, "post_feedforward_layernorm", x)
        return hidden + x

    def _norm(self, layer: LayerWeights, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, layer.norms[name], self.spec.norm_eps)

    def _attention(
        self,
        index: int,
        layer: LayerWeights,
        x: Tensor,
        rotation: tuple[Tensor, Tensor],
        batch: StepBatch,
    ) -> Tensor:
        count, dim = batch.num_tokens, self.spec.head_dim
        q, k, v = (
            _linear(x, layer.linears[f"self_attn.{name}_proj"]).unflatten(-1, (-1, dim))
            for name in "qkv"
        )
        if self.spec.qk_norm:
            q = self._norm(layer, "self_attn.q_norm", q)
            k = self._norm(layer, "self_attn.k_norm", k)
        q = rotate(q[:count], *rotation) * self.spec.attention_scale
        k = rotate(k[:count], *rotation)
        out = x.new_zeros(x.shape[0], self.spec.num_q_heads * dim)
        start = 0
        for piece in batch.slices:
            rows = slice(start, start + len(piece.token_ids))
            out[rows] = self._attend(index, piece, q[rows], k[rows], v[rows]).flatten(1)
            start = rows.stop
        return _linear(out, layer.linears["self_attn.o_proj"])

    def _attend(self, index: int, piece: SequenceSlice, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert self._pools, "allocate_kv comes before execute"
        at = self._group_of[index]
        tables = piece.open_blocks[at], piece.sealed_blocks[at]
        group, pools = self.kv_groups[at], self._pools[at]
        return SliceAttention(self.spec, group, pools, index, piece, tables).run(q, k, v)

    def _mlp(self, layer: LayerWeights, x: Tensor) -> Tensor:
        gate = _linear(x, layer.linears["mlp.gate_proj"])
        up = _linear(x, layer.linears["mlp.up_proj"])
        return _linear(activate(gate, self.spec.activation) * up, layer.linears["mlp.down_proj"])

    def _logits(self, hidden: Tensor, batch: StepBatch) -> Tensor:
        """[num_logits, vocab] of the rows that want logits, in whole tiles."""
        rows: list[int] = []
        start = 0
        for piece in batch.slices:
            start += len(piece.token_ids)
            rows += range(start - piece.num_logits, start)
        padded = pad_rows(hidden[torch.tensor(rows, dtype=torch.int64)])
        padded = rms_norm(padded, self.weights.norm, self.spec.norm_eps)
        logits = tiled_linear(padded, self.weights.head)[: len(rows)]
        return soft_cap(logits, self.spec.logit_soft_cap)


def _linear(x: Tensor, linear: Linear) -> Tensor:
    return tiled_linear(x, linear.weight, linear.bias)
