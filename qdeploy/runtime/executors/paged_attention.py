"""Attention of one sequence slice over its KV blocks, by the position rule (DESIGN §5, P2).

Every tensor shape depends on positions only, so that a query gets the same bits alone, in a
chunk and in a batch (ADR 2): queries go in tiles of QUERY_TILE aligned positions, and a tile in
block q attends (q + 1) · block_size keys, of which those after the query are masked.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qdeploy.kv.groups import KVGroup
from qdeploy.kv.pool import KVPools
from qdeploy.models.spec import DecoderSpec
from qdeploy.runtime.batch import SequenceSlice
from qdeploy_kernels.reference.attention import attend_tile

QUERY_TILE = 16


class SliceAttention:
    """One slice of one layer. Writes the slice's K/V to its group's pools while it attends.

    kv: [2, kv_heads, num_tokens of all blocks, head_dim], what the current query block reads;
    zeros where no token stands yet, since a pool block may hold an earlier request's NaN there,
    and before the window of the slice's first query, whose blocks may be somebody else's by now.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        group: KVGroup,
        pools: KVPools,
        layer: int,
        piece: SequenceSlice,
        tables: tuple[Sequence[int], Sequence[int]],
    ) -> None:
        self.spec, self.config, self.pools = spec, group.config, pools
        self.layer, self.piece = layer, piece
        self.open_blocks, self.sealed_blocks = tables
        self.size = group.config.block_size
        self.end = piece.start + len(piece.token_ids)
        self.oldest = group.first_block(piece.start)
        num_tokens = -(-self.end // self.size) * self.size
        self.kv = torch.zeros((2, spec.num_kv_heads, num_tokens, spec.head_dim))

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q: [num_tokens, num_q_heads, head_dim], scaled; k, v: [num_tokens, kv_heads, head_dim];
        all float32, q and k rotated. Returns [num_tokens, num_q_heads, head_dim].
        """
        out = torch.empty_like(q)
        new = torch.stack((k, v)).transpose(1, 2)  # [2, kv_heads, num_tokens, head_dim]
        first = self.piece.start // self.size
        self._read_context(first)
        for block in range(first, (self.end - 1) // self.size + 1):
            if block > first:
                self._reread_sealed(block)
            low = max(self.piece.start, block * self.size)
            high = min(self.end, (block + 1) * self.size)
            rows = slice(low - self.piece.start, high - self.piece.start)
            self.kv[:, :, low:high] = new[:, :, rows]
            self._store(block, low, high)
            self._attend_block(block, low, high, q[rows], out[rows])
        return out

    def _read_context(self, first: int) -> None:
        """Fill kv with what a query in block `first` reads of earlier steps."""
        context = range(self.oldest, first + 1)
        sealed = [b for b in context if self.config.reads_sealed(b, first)]
        self._load_sealed(sealed)
        for block in sorted(set(context) - set(sealed)):
            low, high = block * self.size, min((block + 1) * self.size, self.piece.start)
            if low < high:
                held = self._id(self.open_blocks, block, "open")
                self.kv[:, :, low:high] = self.pools.read_open(held, self.layer, high - low)

    def _load_sealed(self, blocks: list[int]) -> None:
        if not blocks:
            return
        ids = [self._id(self.sealed_blocks, block, "sealed") for block in blocks]
        by_block = self.kv.unflatten(2, (-1, self.size))
        by_block[:, :, blocks] = self.pools.read_sealed(ids, self.layer)

    def _reread_sealed(self, block: int) -> None:
        """Queries from `block` on read one more block sealed than those before it."""
        newest = block - 1 - self.config.residual_blocks
        if newest >= self.oldest and self.config.reads_sealed(newest, block):
            self._load_sealed([newest])

    def _store(self, block: int, low: int, high: int) -> None:
        """Write tokens low … high − 1 of `block` to its pools; a block that is full now seals."""
        open_id, sealed_id = self.open_blocks[block], self.sealed_blocks[block]
        if open_id >= 0:
            offset = low - block * self.size
            self.pools.write_open(open_id, self.layer, offset, self.kv[:, :, low:high])
        if sealed_id >= 0 and high == (block + 1) * self.size:
            k, v = self.kv[:, :, block * self.size : high]
            self.pools.seal(sealed_id, self.layer, k, v)

    def _attend_block(self, block: int, low: int, high: int, q: Tensor, out: Tensor) -> None:
        tile = min(QUERY_TILE, self.size)
        k, v = self.kv[:, :, : (block + 1) * self.size]
        for start in range(low - low % tile, high, tile):
            a, b = max(start, low), min(start + tile, high)
            padded = q.new_zeros(tile, self.spec.num_q_heads, self.spec.head_dim)
            padded[a - start : b - start] = q[a - low : b - low]
            attended = attend_tile(
                padded,
                k,
                v,
                start,
                window=self.spec.sliding_windows[self.layer],
                cap=self.spec.attention_soft_cap,
            )
            out[a - low : b - low] = attended[a - start : b - start]

    @staticmethod
    def _id(table: Sequence[int], block: int, kind: str) -> int:
        """A block's pool id; −1 would silently read the pool's last block."""
        if table[block] < 0:
            raise RuntimeError(f"block {block} is read {kind}, but its table has no {kind} id")
        return table[block]
