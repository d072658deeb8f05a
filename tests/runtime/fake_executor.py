"""An executor whose logits are a hash of the tokens read back through the block tables.

A wrong table, a block shared by mistake, or a block read open where the rule says sealed (or the
reverse) changes the hash, and so the tokens. Every group keeps the tokens for itself, and reads
what its window shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qdeploy.kv.config import KVCacheConfig
from qdeploy.kv.groups import KVGroup, KVPoolSize
from qdeploy.runtime.batch import BlockIds, SequenceSlice, StepBatch

VOCAB = 32
SEALED = 1000  # added to a token that is read from a sealed block


class FakeGroup:
    """One group's pools: token ids, int32 [blocks, block_size], −7 where nothing was written."""

    def __init__(self, index: int, group: KVGroup, size: KVPoolSize) -> None:
        self.index, self.group, self.config = index, group, group.config
        self.size = group.config.block_size
        self.open = np.full((size.num_open_blocks, self.size), -7, np.int32)
        self.sealed = np.full((size.num_sealed_blocks, self.size), -7, np.int32)

    def write(self, part: SequenceSlice) -> None:
        opened, sealed = part.open_blocks[self.index], part.sealed_blocks[self.index]
        end = part.start + len(part.token_ids)
        assert len(opened) == len(sealed) >= -(-end // self.size)
        for position, token in enumerate(part.token_ids, part.start):
            block = opened[position // self.size]
            if block >= 0:
                self.open[block, position % self.size] = token
        for b, block in enumerate(sealed):
            if block >= 0 and part.start < (b + 1) * self.size <= end:
                positions = range(b * self.size, (b + 1) * self.size)
                self.sealed[block] = [self._open_token(part, p) for p in positions]

    def seen(self, part: SequenceSlice, t: int) -> list[int]:
        """What the query at position t reads: tokens, SEALED more where a block is sealed."""
        found: list[int] = []
        oldest = max(0, t - self.group.window + 1) if self.group.window else 0
        for position in range(oldest, t + 1):
            b = position // self.size
            if self.config.reads_sealed(b, t // self.size):
                block = part.sealed_blocks[self.index][b]
                assert block >= 0, "a sealed block is missing"
                found.append(SEALED + int(self.sealed[block, position % self.size]))
            else:
                found.append(self._open_token(part, position))
        return found

    def _open_token(self, part: SequenceSlice, position: int) -> int:
        block = part.open_blocks[self.index][position // self.size]
        if block >= 0:
            return int(self.open[block, position % self.size])
        # No open copy: the K/V must be scratch of this very slice, from the block's start on.
        assert part.start <= position // self.size * self.size, "an open block is missing"
        return part.token_ids[position - part.start]


class FakeExecutor:
    """vocab_size 32; `fail_next` raises in the next step, `nan_token` poisons rows after it.

    windows: one KV group for each, 0 for none.
    """

    name = "fake"
    act = "fp32"

    def __init__(
        self, kv_config: KVCacheConfig, max_model_len: int = 256, windows: tuple[int, ...] = (0,)
    ) -> None:
        self.spec = SimpleNamespace(vocab_size=VOCAB, max_model_len=max_model_len)
        self.kv_config = kv_config
        self.kv_groups = tuple(
            KVGroup(layers=(i,), config=kv_config.for_layer(i), window=window)
            for i, window in enumerate(windows)
        )
        # As many bytes as read_blocks gives.
        self.open_block_bytes = (4 * kv_config.block_size,) * len(windows)
        self.sealed_block_bytes = tuple(
            4 * kv_config.block_size * group.config.seals for group in self.kv_groups
        )
        self.fail_next: BaseException | None = None
        self.nan_token: int | None = None
        self.batches: list[StepBatch] = []

    def allocate_kv(self, pools: Sequence[KVPoolSize]) -> None:
        pairs = zip(self.kv_groups, pools, strict=True)
        self.groups = [FakeGroup(i, group, size) for i, (group, size) in enumerate(pairs)]

    def execute(self, batch: StepBatch) -> Tensor:
        assert batch.slices, "a step of nothing"
        self.batches.append(batch)
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        for copy in batch.copies:
            pool = self.groups[copy.group].open
            pool[copy.target] = pool[copy.source]
        for part in batch.slices:
            for group in self.groups:
                group.write(part)
        rows = [self._row(part, t) for part in batch.slices for t in wanted(part)]
        return torch.stack(rows) if rows else torch.empty(0, VOCAB)

    def read_blocks(self, ids: Sequence[BlockIds]) -> NDArray[np.uint8]:
        pairs = zip(self.groups, ids, strict=True)
        parts = [p for g, b in pairs for p in (g.open[list(b.open)], g.sealed[list(b.sealed)])]
        return np.concatenate([part.reshape(-1) for part in parts]).view(np.uint8)

    def write_blocks(self, ids: Sequence[BlockIds], data: NDArray[np.uint8]) -> None:
        tokens = data.view(np.int32)
        for group, blocks in zip(self.groups, ids, strict=True):
            for pool, which in ((group.open, blocks.open), (group.sealed, blocks.sealed)):
                size = len(which) * group.size
                pool[list(which)] = tokens[:size].reshape(len(which), group.size)
                tokens = tokens[size:]
        assert not len(tokens), "more bytes than blocks"

    def _row(self, part: SequenceSlice, t: int) -> Tensor:
        seen = [token for group in self.groups for token in group.seen(part, t)]
        if self.nan_token is not None and self.nan_token in seen:
            return torch.full((VOCAB,), float("nan"))
        return hashed_logits(tuple(seen))


def hashed_logits(seen: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(hash(seen) & (2**62 - 1))
    return 3 * torch.randn(VOCAB, generator=generator)


def wanted(part: SequenceSlice) -> range:
    """Positions whose logits come back."""
    end = part.start + len(part.token_ids)
    return range(end - part.num_logits, end)
