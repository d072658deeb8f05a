"""The reference executor: plain torch float32, the oracle of every kernel, anywhere.

It keeps P2 exactly: rows go through fixed tiles of ROW_TILE rows (torch's matmuls give a row other
bits when the number of rows changes, but the same bits at any place of a tile of fixed height).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from qdeploy.errors import CapacityError
from qdeploy.kv.config import KVCacheConfig
from qdeploy.kv.pool import KVPools, open_block_bytes, sealed_block_bytes
from qdeploy.models.spec import DecoderSpec
from qdeploy.runtime.batch import SequenceSlice, StepBatch
from qdeploy.runtime.executors.paged_attention import SliceAttention
from qdeploy.runtime.executors.weights import DecoderWeights, LayerWeights, Linear

ROW_TILE = 16


def tiled_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """x [rows, in] · weightᵀ [in, out], rows a multiple of ROW_TILE, float32."""
    out = x.new_empty(x.shape[0], weight.shape[0])
    transposed = weight.t()
    for start in range(0, x.shape[0], ROW_TILE):
        tile = slice(start, start + ROW_TILE)
        torch.mm(x[tile], transposed, out=out[tile])
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., n] / rms(x) · weight [n]; the offset of (1 + w) norms is in the weight."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


class ReferenceExecutor:
    """Implements Executor in float32; open blocks are float32."""

    name = "reference"

    def __init__(
        self, spec: DecoderSpec, weights: DecoderWeights, kv_config: KVCacheConfig
    ) -> None:
        self.spec, self.weights, self.kv_config = spec, weights, kv_config
        self.open_block_bytes = open_block_bytes(spec, kv_config, itemsize=4)
        self.sealed_block_bytes = sealed_block_bytes(spec, kv_config)
        self._pools: KVPools | None = None
        self._frequencies = {
            rope: rope.inverse_frequencies(spec.head_dim) for rope in set(spec.rope)
        }

    def allocate_kv(self, num_open_blocks: int, num_sealed_blocks: int) -> None:
        """Allocate both pools; drops what they held before."""
        try:
            self._pools = KVPools(self.spec, self.kv_config, num_open_blocks, num_sealed_blocks)
        except RuntimeError:
            needed = num_open_blocks * self.open_block_bytes
            needed += num_sealed_blocks * self.sealed_block_bytes
            raise CapacityError(
                f"{needed / 2**30:.1f} GiB of KV cache can't be allocated; lower kv_cache_memory"
            ) from None

    def with_kv(self, kv_config: KVCacheConfig) -> ReferenceExecutor:
        """A second executor on the same weights, with its own, not yet allocated KV pools."""
        return ReferenceExecutor(self.spec, self.weights, kv_config)

    @torch.inference_mode()
    def execute(self, batch: StepBatch) -> Tensor:
        """Run one step: writes the slices' K/V, returns logits [batch.num_logits, vocab]."""
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

    def _embed(self, ids: Tensor) -> Tensor:
        """[rows, hidden]: rows are the tokens, padded with zeros to whole tiles."""
        rows = -(-len(ids) // ROW_TILE) * ROW_TILE
        hidden = self.weights.embedding.new_zeros(rows, self.spec.hidden_size)
        hidden[: len(ids)] = self.weights.embedding[ids] * self.spec.embedding_multiplier
        return hidden

    def _rotation(self, rope: object, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [num_tokens, 1, head_dim]."""
        angles = positions[:, None].float() * self._frequencies[rope]  # type: ignore[index]
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        return angles.cos(), angles.sin()

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
        q = _rotate(q[:count], *rotation) * self.spec.attention_scale
        k = _rotate(k[:count], *rotation)
        out = x.new_zeros(x.shape[0], self.spec.num_q_heads * dim)
        start = 0
        for piece in batch.slices:
            rows = slice(start, start + len(piece.token_ids))
            out[rows] = self._attend(index, piece, q[rows], k[rows], v[rows]).flatten(1)
            start = rows.stop
        return _linear(out, layer.linears["self_attn.o_proj"])

    def _attend(self, index: int, piece: SequenceSlice, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert self._pools is not None, "allocate_kv comes before execute"
        attention = SliceAttention(self.spec, self.kv_config, self._pools, index, piece)
        return attention.run(q, k, v)

    def _mlp(self, layer: LayerWeights, x: Tensor) -> Tensor:
        gate = _linear(x, layer.linears["mlp.gate_proj"])
        up = _linear(x, layer.linears["mlp.up_proj"])
        return _linear(_activate(gate, self.spec.activation) * up, layer.linears["mlp.down_proj"])

    def _logits(self, hidden: Tensor, batch: StepBatch) -> Tensor:
        """[num_logits, vocab] of the rows that want logits, in whole tiles."""
        rows, start = [], 0
        for piece in batch.slices:
            start += len(piece.token_ids)
            rows += range(start - piece.num_logits, start)
        padded = hidden.new_zeros(-(-len(rows) // ROW_TILE) * ROW_TILE, hidden.shape[1])
        padded[: len(rows)] = hidden[torch.tensor(rows, dtype=torch.int64)]
        padded = rms_norm(padded, self.weights.norm, self.spec.norm_eps)
        logits = tiled_matmul(padded, self.weights.head)[: len(rows)]
        cap = self.spec.logit_soft_cap
        return logits if cap is None else torch.tanh(logits / cap) * cap


def _linear(x: Tensor, linear: Linear) -> Tensor:
    out = tiled_matmul(x, linear.weight)
    return out if linear.bias is None else out.add_(linear.bias)


def _activate(x: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return silu(x)
    return gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of each head: x [num_tokens, heads, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
