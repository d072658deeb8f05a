"""An executor whose logits are a hash of the tokens read back through the block tables.

A wrong table, a block shared by mistake, or a block read open where the rule says sealed (or the
reverse) changes the hash, and so the tokens.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from qdeploy.kv.config import KVCacheConfig
from qdeploy.runtime.batch import SequenceSlice, StepBatch

VOCAB = 32
SEALED = 1000  # added to a token that is read from a sealed block


class FakeExecutor:
    """vocab_size 32; `fail_next` raises in the next step, `nan_token` poisons rows after it."""

    name = "fake"
    act = "fp32"

    def __init__(self, kv_config: KVCacheConfig, max_model_len: int = 256) -> None:
        self.spec = SimpleNamespace(vocab_size=VOCAB, max_model_len=max_model_len)
        self.kv_config = kv_config
        self.open_block_bytes, self.sealed_block_bytes = 4096, 1152
        self.fail_next: BaseException | None = None
        self.nan_token: int | None = None
        self.batches: list[StepBatch] = []

    def allocate_kv(self, num_open_blocks: int, num_sealed_blocks: int) -> None:
        size = self.kv_config.block_size
        self.open = [[-7] * size for _ in range(num_open_blocks)]
        self.sealed = [[-7] * size for _ in range(num_sealed_blocks)]

    def execute(self, batch: StepBatch) -> Tensor:
        self.batches.append(batch)
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        for part in batch.slices:
            self._write(part)
        rows = [self._row(part, t) for part in batch.slices for t in wanted(part)]
        return torch.stack(rows) if rows else torch.empty(0, VOCAB)

    def _write(self, part: SequenceSlice) -> None:
        size, end = self.kv_config.block_size, part.start + len(part.token_ids)
        assert len(part.open_blocks) == len(part.sealed_blocks) == -(-end // size)
        for position, token in enumerate(part.token_ids, part.start):
            block = part.open_blocks[position // size]
            if block >= 0:
                self.open[block][position % size] = token
        for b, sealed in enumerate(part.sealed_blocks):
            fills = part.start < (b + 1) * size <= end
            if sealed >= 0 and fills:
                self.sealed[sealed] = [self._open_token(part, p) for p in block_range(b, size)]

    def _open_token(self, part: SequenceSlice, position: int) -> int:
        size = self.kv_config.block_size
        block = part.open_blocks[position // size]
        if block >= 0:
            return self.open[block][position % size]
        # No open copy: the K/V must be scratch of this very slice, from the block's start on.
        assert part.start <= position // size * size, "an open block is missing"
        return part.token_ids[position - part.start]

    def _row(self, part: SequenceSlice, t: int) -> Tensor:
        size, seen = self.kv_config.block_size, []
        for b in range(t // size + 1):
            positions = range(b * size, min((b + 1) * size, t + 1))
            if self.kv_config.reads_sealed(b, t // size):
                assert part.sealed_blocks[b] >= 0, "a sealed block is missing"
                seen += [SEALED + self.sealed[part.sealed_blocks[b]][p % size] for p in positions]
            else:
                seen += [self._open_token(part, p) for p in positions]
        if self.nan_token is not None and self.nan_token in seen:
            return torch.full((VOCAB,), float("nan"))
        return hashed_logits(tuple(seen))


def hashed_logits(seen: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(hash(seen) & (2**62 - 1))
    return 3 * torch.randn(VOCAB, generator=generator)


def block_range(block: int, size: int) -> range:
    return range(block * size, (block + 1) * size)


def wanted(part: SequenceSlice) -> range:
    """Positions whose logits come back."""
    end = part.start + len(part.token_ids)
    return range(end - part.num_logits, end)
