"""Verification of drafts: tokens that are dropped again leave no trace, numbers or not.

A step verifies one or more kept tokens and k drafts after them. The next step begins after the
kept ones, in the middle of a block, writes over the drafts and seals anew what they had filled.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qdeploy.kv.config import KV_DTYPES, KVCacheConfig
from qdeploy.runtime.batch import SequenceSlice, StepBatch
from qdeploy.runtime.executors import load_executor
from qdeploy.runtime.executors.base import Executor
from tables import FreeIds, GroupTables, SequenceTables, fresh_pools, run_chunks
from tiny_models import tiny_checkpoint

LENGTH, SICK = 75, 255
PROMPT = torch.randint(0, 255, (LENGTH,), generator=torch.Generator().manual_seed(5)).tolist()
POLICIES = [
    KVCacheConfig(dtype=dtype, block_size=16, sink_blocks=sink, residual_blocks=residual)
    for dtype, sink, residual in itertools.product(KV_DTYPES, (0, 1), (0, 1))
    if dtype != "bf16" or (sink, residual) == (0, 0)
]


class DraftTables(GroupTables):
    """Tables of one group whose last tokens may be dropped again."""

    def step_with_drafts(self, start: int, certain: int, end: int) -> tuple[list[int], list[int]]:
        """As `step`, but what tokens from `certain` on fill keeps its open copy."""
        size, count = self.config.block_size, -(-end // self.config.block_size)
        for block in range(start // size, count):
            scratch = self.config.reads_sealed(block, certain // size)
            if block not in self.open and not scratch:
                self.open[block] = self.pool.take_open()
            if (block + 1) * size <= end and self.config.seals and block >= self.config.sink_blocks:
                self.sealed[block] = self.pool.take_sealed()
        opened, sealed = (
            [ids.get(b, -1) for b in range(count)] for ids in (self.open, self.sealed)
        )
        return opened, sealed

    def keep(self, end: int) -> None:
        """Tokens from `end` on are dropped, and with them what they alone filled or began."""
        self._free_unread(end)
        size = self.config.block_size
        for block in [b for b in self.open if b * size >= end]:
            self.pool.give_open(self.open.pop(block))
        for block in [b for b in self.sealed if (b + 1) * size > end]:
            self.pool.give_sealed(self.sealed.pop(block))


class DraftSequence(SequenceTables):
    """Hands out ids of all groups to a sequence that is verified."""

    def __init__(self, pools: list[FreeIds]) -> None:
        self.drafted = [DraftTables(pool) for pool in pools]

    def verify(self, tokens: list[int], start: int, certain: int) -> SequenceSlice:
        """A slice of `tokens` from `start` on, of which those from `certain` on are drafts."""
        end = start + len(tokens)
        ids = [group.step_with_drafts(start, certain, end) for group in self.drafted]
        opened, sealed = zip(*ids, strict=True)
        return SequenceSlice(
            token_ids=tokens,
            start=start,
            open_blocks=opened,
            sealed_blocks=sealed,
            num_logits=len(tokens),
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Windows of 24 in six of seven layers. Token 255 overflows: its hidden state is NaN."""
    path = tmp_path_factory.mktemp("gemma")
    tiny_checkpoint("gemma3_text", path, tie_word_embeddings=False)
    tensors = load_file(path / "model.safetensors")
    tensors["model.embed_tokens.weight"][SICK] = 3e38
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def check_drafts(executor: Executor, expected: torch.Tensor, seed: int) -> None:
    """Every kept row of a sequence that is verified throughout, against plain decoding."""
    draw = random.Random(seed)
    sequence = DraftSequence(fresh_pools(executor))
    start = 0
    while start < LENGTH:
        kept = min(draw.choice((1, 1, 1, 3, 20)), LENGTH - start)
        drafts = [draw.choice((1, 2, SICK)) for _ in range(draw.choice((0, 1, 6, 20, 40)))]
        tokens = PROMPT[start : start + kept] + drafts
        piece = sequence.verify(tokens, start, start + kept)
        got = executor.execute(StepBatch([piece]))
        start += kept
        assert torch.equal(got[:kept], expected[start - kept : start]), executor.kv_config.key
        for group in sequence.drafted:
            group.keep(start)


@pytest.mark.parametrize("act", ["int8", "fp32"])
def test_dropped_drafts_leave_no_trace(folder: Path, act: str, isa: str) -> None:
    base = load_executor(folder, backend="cpu", kv_config=POLICIES[0], act=act, threads=1)
    for seed, policy in enumerate(POLICIES):
        executor = base.with_kv(policy)
        expected = run_chunks(executor, PROMPT, range(1, LENGTH + 1))
        assert expected.isfinite().all()
        check_drafts(executor, expected, seed)


@pytest.mark.parametrize("act", ["int8", "fp32"])
def test_p5_a_later_token_that_is_no_number_leaves_the_rows_before_it(
    folder: Path, act: str, isa: str
) -> None:
    """Whether it is in their tile of queries, in their block, or further on."""
    executor = load_executor(folder, backend="cpu", kv_config=POLICIES[-1], act=act)
    expected = run_chunks(executor, PROMPT, [LENGTH])
    for place in (1, 7, 8, 15, 16, 40, LENGTH - 1):
        tokens = [*PROMPT[:place], SICK, *PROMPT[place + 1 :]]
        got = run_chunks(executor, tokens, [LENGTH])
        assert torch.equal(got[:place], expected[:place])
        assert not got[place].isfinite().any()
