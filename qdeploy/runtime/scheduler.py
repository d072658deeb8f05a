"""Which tokens the next step computes. Continuous batching with one token budget; no torch here.

Order within a step: decodes, then prefill chunks of running requests, then admissions; each
oldest first. When blocks run out the newest running request is preempted and recomputed later.
The oldest request can always take everybody else's blocks, and alone it fits (`add` checks), so
the system can't deadlock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from qdeploy.errors import CapacityError, UsageError
from qdeploy.runtime.batch import SequenceSlice, StepBatch
from qdeploy.runtime.block_manager import BlockManager
from qdeploy.runtime.request import Request, RequestStatus


@dataclass(slots=True)
class ScheduledStep:
    """num_scheduled_tokens per request, in batch order; preempted: who lost its blocks.

    num_tokens: their sum.
    """

    num_scheduled_tokens: dict[Request, int] = field(default_factory=dict)
    preempted: list[Request] = field(default_factory=list)
    num_tokens: int = 0


class Scheduler:
    """Waiting and running requests.

    An entry of `waiting` is admitted whole or not at all: the n samples of a new request, or one
    preempted sample. `running` is sorted from oldest to newest.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        enable_chunked_prefill: bool = True,
    ) -> None:
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.enable_chunked_prefill = enable_chunked_prefill
        self.waiting: deque[tuple[Request, ...]] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        """Samples that wait."""
        return sum(len(entry) for entry in self.waiting)

    @property
    def has_unfinished(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self.waiting or self.running)

    def add(self, samples: Sequence[Request]) -> None:
        """Queue the samples of one request; refuse what could never run."""
        if len(samples) > self.max_num_seqs:
            raise UsageError(
                f"n={len(samples)} exceeds max_num_seqs={self.max_num_seqs}; ask for fewer samples",
                param="n",
            )
        for request in samples:
            longest = request.num_prompt_tokens + request.max_tokens
            if not self.blocks.fits_alone(longest):
                raise CapacityError(
                    f"request {request.request_id!r} needs KV blocks for {longest} tokens, more "
                    "than the whole cache has; shorten it or raise kv_cache_memory"
                )
        self.waiting.append(tuple(samples))

    def schedule(self) -> ScheduledStep:
        """Choose the next step and give it its blocks."""
        step = ScheduledStep()
        for request in [r for r in self.running if r.is_decoding]:
            self._run(step, request, 1)
        for request in [r for r in self.running if not r.is_decoding]:
            if not self._run(step, request, request.num_uncomputed_tokens):
                return step  # newcomers would take what it waits for (unchunked: the budget)
        # After a preemption the freed blocks belong to the older requests first.
        if not step.preempted:
            self._admit(step)
        return step

    def batch(self, step: ScheduledStep) -> StepBatch:
        """The executor's view of a step."""
        return StepBatch([self._slice(r, n) for r, n in step.num_scheduled_tokens.items()])

    def commit(self, step: ScheduledStep) -> None:
        """The executor has run the step: advance, release what is no longer needed."""
        for request, num_tokens in step.num_scheduled_tokens.items():
            request.num_computed_tokens += num_tokens
            self.blocks.commit(request.sequence_id, request.num_computed_tokens)

    def finish(self, request: Request) -> None:
        """Remove a request, wherever it is, and free its blocks. Harmless when repeated."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        elif request.status is RequestStatus.WAITING:
            entries = (tuple(r for r in e if r is not request) for e in self.waiting)
            self.waiting = deque(e for e in entries if e)
        self.blocks.free(request.sequence_id)
        request.status = RequestStatus.FINISHED

    def check_integrity(self) -> None:
        """Raise AssertionError when queues, tables and progress disagree."""
        self.blocks.check_integrity()
        waiting = [r for entry in self.waiting for r in entry]
        assert len(self.running) <= self.max_num_seqs, "too many sequences run"
        assert all(r.status is RequestStatus.RUNNING for r in self.running), "status of running"
        assert all(r.status is RequestStatus.WAITING for r in waiting), "status of waiting"
        orders = [(r.order, r.index) for r in self.running]
        assert orders == sorted(set(orders)), "running isn't sorted by age"
        running = {r.sequence_id for r in self.running}
        assert set(self.blocks.tables) <= running, "blocks held by a request that doesn't run"
        for request in self.running:
            table = self.blocks.tables.get(request.sequence_id)
            computed = table.num_tokens if table is not None else 0
            assert computed == request.num_computed_tokens, "table and progress disagree"

    def _slice(self, request: Request, num_tokens: int) -> SequenceSlice:
        start = request.num_computed_tokens
        end = start + num_tokens
        open_blocks, sealed_blocks = self.blocks.tables[request.sequence_id].ids()
        num_logits = 1 if end == request.num_tokens else 0
        if request.scoring:
            num_logits = max(0, end - max(start, request.num_scored))
        return SequenceSlice(
            token_ids=request.token_ids[start:end],
            start=start,
            open_blocks=open_blocks,
            sealed_blocks=sealed_blocks,
            num_logits=num_logits,
        )

    def _admit(self, step: ScheduledStep) -> None:
        """Move entries from waiting to running, first come first served."""
        while self.waiting:
            entry = self.waiting[0]
            if len(self.running) + len(entry) > self.max_num_seqs:
                return
            if self._chunk(step, entry[0], entry[0].num_uncomputed_tokens) == 0:
                return
            if self.running and not self._fits_now(entry):
                return
            self.waiting.popleft()
            for request in entry:
                request.status = RequestStatus.RUNNING
                self.running.append(request)
            self.running.sort(key=lambda r: (r.order, r.index))
            for request in entry:
                # Never preempts: if blocks lack after all, the request runs in a later step.
                self._run(step, request, request.num_uncomputed_tokens, may_preempt=False)

    def _fits_now(self, entry: tuple[Request, ...]) -> bool:
        """Whether free blocks hold all tokens that the entry has so far, and one more each.

        Not a reservation: it only keeps a newcomer from being preempted at once.
        """
        return self.blocks.fit_now([r.num_tokens + 1 for r in entry])

    def _chunk(self, step: ScheduledStep, request: Request, wanted: int) -> int:
        """How many of `wanted` tokens the step's budget admits; 0 for none."""
        left = self.max_num_batched_tokens - step.num_tokens
        if wanted <= left:
            return wanted
        return left if self.enable_chunked_prefill else 0

    def _run(
        self, step: ScheduledStep, request: Request, wanted: int, *, may_preempt: bool = True
    ) -> bool:
        """Give `request` up to `wanted` tokens of the step; False when it got none."""
        if request.status is not RequestStatus.RUNNING:
            return False  # preempted earlier in this step
        num_tokens = self._chunk(step, request, wanted)
        while num_tokens:
            num_tokens = self._allocate(request, num_tokens)
            if num_tokens > 0:
                step.num_scheduled_tokens[request] = num_tokens
                step.num_tokens += num_tokens
                return True
            if not may_preempt or not self._preempt_newest(step, request):
                return False
            num_tokens = self._chunk(step, request, wanted)
        return False

    def _allocate(self, request: Request, num_tokens: int) -> int:
        """Get blocks for num_tokens, else for a chunk that ends with the current block, else 0."""
        start, size = request.num_computed_tokens, self.blocks.block_size
        to_block_end = size - start % size
        for chunk in (num_tokens, min(num_tokens, to_block_end)):
            if self.blocks.allocate(request.sequence_id, start + chunk):
                return chunk
        return 0

    def _preempt_newest(self, step: ScheduledStep, request: Request) -> bool:
        """Take the newest request's blocks; False when that is `request` itself."""
        victim = self.running.pop()
        step.num_tokens -= step.num_scheduled_tokens.pop(victim, 0)
        step.preempted.append(victim)
        self.blocks.free(victim.sequence_id)
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        victim.status = RequestStatus.WAITING
        self.num_preemptions += 1
        # Victims fall newest first, so each goes before the one before it.
        self.waiting.appendleft((victim,))
        return victim is not request
