"""Attention of one sequence slice over its KV blocks, by the position rule (DESIGN §5, P2).

Every tensor shape depends on positions only, so that a query gets the same bits alone, in a
chunk and in a batch (ADR 2): queries go in tiles of `QUERY_TILE` aligned positions, and a tile in
block q attends (q + 1) · block_size keys, of which those after the query are masked.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qdeploy.kv.config import KVCacheConfig
from qdeploy.kv.pool import KVPools
from qdeploy.models.spec import DecoderSpec
from qdeploy.runtime.batch import SequenceSlice

QUERY_TILE = 16


class SliceAttention:
    """One slice of one layer. Writes the slice's K/V to the pools while it attends."""

    def __init__(
        self,
        spec: DecoderSpec,
        config: KVCacheConfig,
        pools: KVPools,
        layer: int,
        piece: SequenceSlice,
    ) -> None:
        self.spec, self.config, self.pools = spec, config, pools
        self.layer, self.piece = layer, piece
        self.size = config.block_size
        self.end = piece.start + len(piece.token_ids)
        shape = (2, spec.num_kv_heads, len(piece.open_blocks) * self.size, spec.head_dim)
        self.kv = torch.zeros(shape)

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q: [num_tokens, num_q_heads, head_dim], scaled; k, v: [num_tokens, kv_heads, head_dim];
        all float32 and rotated. Returns [num_tokens, num_q_heads, head_dim].
        """
        out = torch.empty_like(q)
        new = torch.stack((k, v)).transpose(1, 2)  # [2, kv_heads, num_tokens, head_dim]
        first = self.piece.start // self.size
        self._read_context(first)
        for block in range(first, (self.end - 1) // self.size + 1):
            self._reread_sealed(block, first)
            low = max(self.piece.start, block * self.size)
            high = min(self.end, (block + 1) * self.size)
            rows = slice(low - self.piece.start, high - self.piece.start)
            self.kv[:, :, low:high] = new[:, :, rows]
            self._store(block, low, high)
            self._attend_block(block, low, high, q[rows], out[rows])
        return out

    def _span(self, block: int) -> slice:
        return slice(block * self.size, (block + 1) * self.size)

    def _read_context(self, first: int) -> None:
        """Fill kv with what a query in block `first` reads of earlier steps."""
        sealed = [b for b in range(first) if self.config.reads_sealed(b, first)]
        self._load_sealed(sealed)
        for block in range(first + (self.piece.start % self.size > 0)):
            if not self.config.reads_sealed(block, first):
                held = self.pools.open[self.piece.open_blocks[block], self.layer]
                self.kv[:, :, self._span(block)] = held

    def _load_sealed(self, blocks: list[int]) -> None:
        if not blocks:
            return
        ids = [self.piece.sealed_blocks[block] for block in blocks]
        for block, k, v in zip(blocks, *self.pools.read_sealed(ids, self.layer), strict=True):
            self.kv[0, :, self._span(block)] = k
            self.kv[1, :, self._span(block)] = v

    def _reread_sealed(self, block: int, first: int) -> None:
        """Queries from `block` on read one more block sealed than those before it."""
        newest = block - 1 - self.config.residual_blocks
        if block > first and newest >= 0 and self.config.reads_sealed(newest, block):
            self._load_sealed([newest])

    def _store(self, block: int, low: int, high: int) -> None:
        open_id, sealed_id = self.piece.open_blocks[block], self.piece.sealed_blocks[block]
        span = self._span(block)
        if open_id >= 0:
            inside = slice(low - span.start, high - span.start)
            self.pools.open[open_id, self.layer, :, :, inside] = self.kv[:, :, low:high]
        if sealed_id >= 0 and high == span.stop:
            k, v = self.kv[:, :, span]
            self.pools.seal(sealed_id, self.layer, k, v)

    def _attend_block(self, block: int, low: int, high: int, q: Tensor, out: Tensor) -> None:
        tile = min(QUERY_TILE, self.size)
        k, v = self.kv[:, :, : (block + 1) * self.size]
        for start in range(low - low % tile, high, tile):
            a, b = max(start, low), min(start + tile, high)
            padded = q.new_zeros(tile, self.spec.num_q_heads, self.spec.head_dim)
            padded[a - start : b - start] = q[a - low : b - low]
            positions = torch.arange(start, start + tile)
            attended = self._attend_tile(padded, k, v, positions)
            out[a - low : b - low] = attended[a - start : b - start]

    def _attend_tile(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        """q: [tile, num_q_heads, head_dim]; k, v: [kv_heads, num_keys, head_dim]; same shape out."""
        heads, dim, tile = self.spec.num_kv_heads, self.spec.head_dim, len(q)
        grouped = q.view(tile, heads, -1, dim).permute(1, 2, 0, 3).reshape(heads, -1, dim)
        scores = torch.matmul(grouped, k.transpose(1, 2))  # [kv_heads, group · tile, num_keys]
        if self.spec.attention_soft_cap is not None:
            cap = self.spec.attention_soft_cap
            scores = torch.tanh(scores / cap) * cap
        keys = torch.arange(k.shape[1])
        hidden = keys > positions[:, None]
        window = self.spec.sliding_windows[self.layer]
        if window is not None:
            hidden |= keys <= positions[:, None] - window
        scores = scores.view(heads, -1, tile, len(keys)).masked_fill(hidden, float("-inf"))
        weights = torch.softmax(scores, dim=-1).view(heads, -1, len(keys))
        return torch.matmul(weights, v).view(heads, -1, tile, dim).permute(2, 0, 1, 3).flatten(1, 2)
