"""Drafts from a second, smaller or cheaper model with the target's vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from qdeploy.runtime.batch import SequenceSlice, StepBatch
from qdeploy.runtime.block_manager import BlockManager
from qdeploy.runtime.request import Request
from qdeploy.runtime.sampler import sample
from qdeploy.runtime.speculation.base import Draft
from qdeploy.runtime.speculation.shadow import Shadow
from qdeploy.runtime.speculation.step_cost import StepCost

if TYPE_CHECKING:
    from qdeploy.runtime.executors.base import Executor

Row = NDArray[np.float32]
Rows = NDArray[np.float32]
_READING = 16  # tokens in a slice from which on it tells what reading a prompt costs
_FIRST_READ_COST = 0.2  # of a step of one token, for each token read, until it is measured
_IMPOSSIBLE = np.float32(-1e30)  # a logit of ids that the draft hasn't got; finite, for the sampler


@dataclass(slots=True)
class _Sequence:
    """shadow: what the draft model has been shown; num_computed: tokens whose K/V are right."""

    shadow: Shadow
    num_computed: int


@dataclass(slots=True)
class _Job:
    """One request of a proposal: drafts wanted, drafts made."""

    sequence: _Sequence
    count: int
    drafts: list[int]

    @property
    def request(self) -> Request:
        return self.sequence.shadow.request


class ModelDrafter:
    """Implements Drafter with an executor and blocks of its own; prompts share prefixes there, too.

    The draft samples with the target's noise, so that it guesses right at any temperature as often
    as the two distributions allow (Daliri et al. 2024). What it has computed is found out from the
    tokens themselves: whatever happened since the last proposal, nothing is lost or out of step.

    max_tokens: that a proposal computes at most to read what it hasn't seen; requests that need
    more get their drafts later. banned: as for the target's sampler.
    """

    free = False

    def __init__(
        self,
        executor: Executor,
        blocks: BlockManager,
        *,
        name: str = "draft_model",
        vocab_size: int,
        max_model_len: int,
        max_tokens: int,
        banned: Callable[[Request], Set[int]],
    ) -> None:
        self.name = name
        self._executor, self._blocks = executor, blocks
        self._vocab_size, self._max_model_len = vocab_size, max_model_len
        self._max_tokens, self._banned = max_tokens, banned
        self._sequences: dict[str, _Sequence] = {}
        self._cost = StepCost()
        self._read_seconds: float | None = None

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Draft]:
        """Read what is new, then draft token by token, all requests in one batch."""
        jobs = [self._job(r, count) for r, count in zip(requests, counts, strict=True)]
        ready, rows = self._read(jobs)
        while ready:
            ready = [job for job, row in zip(ready, rows, strict=True) if self._take(job, row)]
            if ready:
                rows = self._execute([self._next(job) for job in ready])
        return [Draft(job.drafts) for job in jobs]

    def observe(self, request: Request, num_accepted: int) -> None:
        """Nothing: the next proposal compares tokens."""

    def forget(self, request: Request) -> None:
        """Free the request's blocks; full ones stay cached for later prompts."""
        sequence = self._sequences.pop(request.sequence_id, None)
        if sequence is not None:
            self._follow(sequence, request)
            self._blocks.free(request.sequence_id)

    def seconds(self, num_requests: int) -> float:
        """Predicted seconds of one more drafted token each for num_requests requests."""
        return self._cost(num_requests)

    def catch_up_seconds(self, request: Request) -> float:
        """Predicted seconds to read the request's tokens that aren't computed yet."""
        sequence = self._sequences.get(request.sequence_id)
        lag = request.num_tokens - 1 - (sequence.num_computed if sequence is not None else 0)
        per_token = self._read_seconds
        if per_token is None:
            per_token = _FIRST_READ_COST * self._cost(1)
        return max(0, lag - _READING) * per_token

    def _job(self, original: Request, count: int) -> _Job:
        sequence = self._sequences.get(original.sequence_id)
        if sequence is None:
            sequence = _Sequence(Shadow(original), self._adopt(original))
            self._sequences[original.sequence_id] = sequence
        self._follow(sequence, original)
        # A draft is computed, but for the last one, to draft the next.
        return _Job(sequence, min(count, self._max_model_len - original.num_tokens + 1), [])

    def _follow(self, sequence: _Sequence, original: Request) -> None:
        """Drop guesses that the target didn't make true; its last token is always computed."""
        same = sequence.shadow.follow(original)
        request = sequence.shadow.request
        sequence.num_computed = min(sequence.num_computed, same, request.num_tokens - 1)
        self._commit(sequence)

    def _adopt(self, request: Request) -> int:
        """Begin with what earlier requests left in the draft's prefix cache; its length."""
        hit = self._blocks.match(request.token_ids, request.cache_salt)
        self._blocks.adopt(request.sequence_id, hit)
        return hit.num_tokens

    def _commit(self, sequence: _Sequence) -> None:
        """Keep what is computed of the true tokens; gives back blocks that guesses took."""
        request = sequence.shadow.request
        if request.sequence_id in self._blocks.tables:
            self._blocks.commit(
                request.sequence_id, sequence.num_computed, request.token_ids, request.cache_salt
            )

    def _read(self, jobs: Sequence[_Job]) -> tuple[list[_Job], Rows]:
        """Compute what the draft model hasn't seen; the jobs that are up to date, and their rows.

        What doesn't fit is read next time, and what finds no blocks isn't drafted at all.
        """
        budget, ready, late = self._max_tokens, list[_Job](), list[SequenceSlice]()
        reading: list[tuple[_Sequence, int]] = []
        for job in jobs:
            start, end = job.sequence.num_computed, job.request.num_tokens
            if job.count < 1 or not budget:
                continue
            if end - start <= budget:
                if self._allocate(job.request, end + job.count - 1, end, jobs):
                    ready.append(job)
                    budget -= end - start
            elif self._allocate(job.request, start + budget, start + budget, jobs):
                late.append(self._slice(job, start, start + budget, num_logits=0))
                reading.append((job.sequence, start + budget))
                budget = 0
        slices = [self._slice(j, j.sequence.num_computed, j.request.num_tokens) for j in ready]
        rows = self._execute([*slices, *late])
        for sequence, end in [*reading, *((j.sequence, j.request.num_tokens) for j in ready)]:
            sequence.num_computed = end
        for sequence, _ in reading:
            self._commit(sequence)
        return ready, rows

    def _take(self, job: _Job, row: Row) -> bool:
        """Draw a draft; whether the job wants another one, which needs this one's K/V."""
        row = self._fit(row)
        sampled = sample(row, job.request, self._banned(job.request))
        if sampled.error is not None:
            return False
        job.request.append(sampled.token_id, 0.0)
        job.drafts.append(sampled.token_id)
        return len(job.drafts) < job.count

    def _fit(self, row: Row) -> Row:
        """Logits [vocab of the target]: rows of embeddings may be padded differently."""
        if row.size >= self._vocab_size:
            return row[: self._vocab_size]
        return np.pad(row, (0, self._vocab_size - row.size), constant_values=_IMPOSSIBLE)

    def _next(self, job: _Job) -> SequenceSlice:
        """The step that computes the last draft."""
        job.sequence.num_computed += 1
        return self._slice(job, job.request.num_tokens - 1, job.request.num_tokens)

    def _slice(self, job: _Job, start: int, end: int, num_logits: int = 1) -> SequenceSlice:
        open_blocks, sealed_blocks = self._blocks.tables[job.request.sequence_id].ids()
        return SequenceSlice(
            token_ids=job.request.token_ids[start:end],
            start=start,
            open_blocks=open_blocks,
            sealed_blocks=sealed_blocks,
            num_logits=num_logits,
        )

    def _execute(self, slices: Sequence[SequenceSlice]) -> Rows:
        """Logits [rows, vocab of the draft]; learns what steps cost."""
        if not slices:
            return np.empty((0, self._vocab_size), np.float32)
        batch = StepBatch(slices)
        start = perf_counter()
        rows: Rows = self._executor.execute(batch).cpu().numpy()
        seconds = perf_counter() - start
        tokens = batch.num_tokens
        if tokens < _READING * len(slices):
            self._cost.note(tokens, seconds)
        else:
            old = self._read_seconds
            self._read_seconds = seconds / tokens if old is None else (old + seconds / tokens) / 2
        return rows

    def _allocate(self, request: Request, end: int, certain: int, jobs: Sequence[_Job]) -> bool:
        """Blocks for a step up to `end`, if need be those of requests that aren't drafted now."""
        name = request.sequence_id
        if self._blocks.allocate(name, end, certain_end=certain):
            return True
        busy = {job.request.sequence_id for job in jobs}
        for other in [other for other in self._sequences if other not in busy]:
            self._blocks.free(other)
            del self._sequences[other]
        return self._blocks.allocate(name, end, certain_end=certain)
