"""Which tokens the next step computes. Continuous batching with one token budget; no torch here.

Requests are served in the order of `Request.rank`, priority and age in one static number. Within a
step: decodes, drafts, then prompt chunks of running requests, then admissions. When blocks run out
the last running request is preempted; it waits, to be recomputed or with its K/V on the host. The
first request can always take everybody else's blocks, and alone it fits (`add` checks), so the
system can't deadlock.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field

from qdeploy.errors import CapacityError, UsageError
from qdeploy.runtime.admitter import Admitter
from qdeploy.runtime.batch import BlockIds, SequenceSlice, StepBatch
from qdeploy.runtime.block_manager import BlockManager, Restored
from qdeploy.runtime.preemption import PreemptionPolicy
from qdeploy.runtime.prefix_cache import PrefixHit
from qdeploy.runtime.request import Request, RequestStatus
from qdeploy.runtime.swap_space import SwapSpace

#: Rows of logits of one prompt in one step: 128 × 49,152 float32 are 25 MB.
MAX_PROMPT_LOGITS = 128


@dataclass(slots=True)
class ScheduledStep:
    """num_scheduled_tokens per request, in batch order; preempted: who lost its blocks.

    num_tokens: their sum. swap_outs: read these blocks first; swap_ins: then write those; both
    before the step.
    """

    num_scheduled_tokens: dict[Request, int] = field(default_factory=dict)
    preempted: list[Request] = field(default_factory=list)
    num_tokens: int = 0
    swap_outs: dict[Request, tuple[BlockIds, ...]] = field(default_factory=dict)
    swap_ins: dict[Request, Restored] = field(default_factory=dict)


class Scheduler:
    """Waiting and running requests, both sorted by rank.

    A request in `waiting` may have followers, the other samples of its prompt: they are admitted
    together or not at all, and fork when the prompt is computed. Until then they take seats only.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        enable_chunked_prefill: bool = True,
        policy: PreemptionPolicy | None = None,
        swap: SwapSpace | None = None,
    ) -> None:
        self.blocks = blocks
        self.admitter = Admitter(blocks)
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.enable_chunked_prefill = enable_chunked_prefill
        self.policy = PreemptionPolicy() if policy is None else policy
        self.swap = SwapSpace(0, [1] * len(blocks.columns)) if swap is None else swap
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.num_swaps = 0
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0

    @property
    def num_waiting(self) -> int:
        """Samples that wait."""
        return sum(request.num_samples for request in self.waiting)

    @property
    def num_running(self) -> int:
        """Samples that run, or will once their leader's prompt is computed."""
        return sum(request.num_samples for request in self.running)

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
        leader, *followers = samples
        longest = leader.num_prompt_tokens + leader.max_tokens
        if not self.blocks.fits_alone(longest):
            raise CapacityError(
                f"request {leader.request_id!r} needs KV blocks for {longest} tokens, more "
                "than the whole cache has; shorten it or raise kv_cache_memory"
            )
        _lead(leader, followers)
        self._wait(leader)

    # --- a step --------------------------------------------------------------------------------

    def schedule(self) -> ScheduledStep:
        """Choose the next step and give it its blocks."""
        step = ScheduledStep()
        for request in [r for r in self.running if r.is_decoding]:
            self._run(step, request, 1)
        self._add_drafts(step)
        if self._run_prompts(step) and not step.preempted:
            # After a preemption the freed blocks belong to the earlier requests first.
            self._admit(step)
        self._allocate_drafts(step)
        return step

    def batch(self, step: ScheduledStep) -> StepBatch:
        """The executor's view of a step."""
        scheduled = step.num_scheduled_tokens
        return StepBatch(
            slices=[self._slice(request, n) for request, n in scheduled.items()],
            copies=self.blocks.take_copies([request.sequence_id for request in scheduled]),
        )

    def commit(self, request: Request, num_tokens: int) -> None:
        """The executor has run the step, and the first num_tokens of the request's slice are
        kept: all but rejected drafts. Accepted drafts are in token_ids by then.
        """
        request.num_computed_tokens += num_tokens
        self.blocks.commit(
            request.sequence_id,
            request.num_computed_tokens,
            request.token_ids,
            request.cache_salt,
        )

    def fork(self, leader: Request) -> list[Request]:
        """Start the followers of a request whose prompt is computed; returns them."""
        followers, leader.followers = leader.followers, []
        for request in followers:
            self.blocks.fork(leader.sequence_id, request.sequence_id)
            request.leader = None
            request.num_computed_tokens = leader.num_computed_tokens
            request.num_cached_tokens = leader.num_cached_tokens
            request.status = RequestStatus.RUNNING
            insort(self.running, request, key=_rank)
        return followers

    # --- leaving -------------------------------------------------------------------------------

    def finish(self, request: Request) -> None:
        """Remove a request, wherever it is, and free what it holds. Harmless when repeated."""
        if request.status is RequestStatus.FINISHED:
            return
        if request.leader is not None:
            request.leader.followers.remove(request)
        elif request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self._release(request)
        request.status = RequestStatus.FINISHED
        if request.followers:
            heir, *rest = request.followers
            request.followers, heir.leader = [], None
            _lead(heir, rest)
            self._wait(heir)

    def restart(self, step: ScheduledStep, request: Request) -> None:
        """Compute a request anew: its K/V got lost on the way from or to the host."""
        step.num_tokens -= step.num_scheduled_tokens.pop(request, 0)
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self._release(request)
        self._wait(request)

    def check_integrity(self) -> None:
        """Raise AssertionError when queues, tables, swap space and progress disagree."""
        self.blocks.check_integrity()
        swapped = [r for r in self.waiting if r.status is RequestStatus.SWAPPED]
        self.swap.check_integrity([r.sequence_id for r in swapped])
        for queue in (self.waiting, self.running):
            ranks = [r.rank for r in queue]
            assert ranks == sorted(set(ranks)), "a queue isn't sorted by rank"
            for leader in queue:
                assert all(f.leader is leader for f in leader.followers), "followers astray"
                assert leader.leader is None, "a follower in a queue"
        assert self.num_running <= self.max_num_seqs, "too many sequences run"
        assert all(r.status is RequestStatus.RUNNING for r in self.running), "status of running"
        waits = (RequestStatus.WAITING, RequestStatus.SWAPPED)
        assert all(r.status in waits for r in self.waiting), "status of waiting"
        running = {r.sequence_id for r in self.running}
        assert set(self.blocks.tables) <= running, "blocks held by a request that doesn't run"
        for request in self.running:
            table = self.blocks.tables.get(request.sequence_id)
            computed = table.num_tokens if table is not None else 0
            assert computed == request.num_computed_tokens, "table and progress disagree"

    # --- inside --------------------------------------------------------------------------------

    def _wait(self, request: Request) -> None:
        insort(self.waiting, request, key=_rank)

    def _release(self, request: Request) -> None:
        self.blocks.free(request.sequence_id)
        self.swap.drop(request.sequence_id)
        request.num_computed_tokens = 0
        request.status = RequestStatus.WAITING

    def _slice(self, request: Request, num_tokens: int) -> SequenceSlice:
        start = request.num_computed_tokens
        end = start + num_tokens
        token_ids = request.token_ids[start:end]
        if end > request.num_tokens:
            token_ids += request.draft_token_ids[: end - request.num_tokens]
        open_blocks, sealed_blocks = self.blocks.tables[request.sequence_id].ids()
        return SequenceSlice(
            token_ids=token_ids,
            start=start,
            open_blocks=open_blocks,
            sealed_blocks=sealed_blocks,
            num_logits=request.num_logits(start, end),
        )

    def _add_drafts(self, step: ScheduledStep) -> None:
        """Give the step's decodes as many of their drafts as budget and max_tokens admit."""
        for request in self.running:
            drafts = request.draft_token_ids
            if not drafts:
                continue
            room = min(
                self.max_num_batched_tokens - step.num_tokens,
                request.max_tokens - request.num_output_tokens - 1,
            )
            del drafts[max(0, room) if request in step.num_scheduled_tokens else 0 :]
            if drafts:
                step.num_scheduled_tokens[request] += len(drafts)
                step.num_tokens += len(drafts)

    def _allocate_drafts(self, step: ScheduledStep) -> None:
        """Drafts get the blocks that are left when everything else has its own, or are dropped."""
        size = self.blocks.block_size
        for request in step.num_scheduled_tokens:
            drafts = request.draft_token_ids
            if not drafts:
                continue
            certain = request.num_tokens
            in_tail = max(0, -certain % size - 1)  # more that surely need no block
            for kept in (len(drafts), min(len(drafts), in_tail), 0):
                end = certain + kept
                if self.blocks.allocate(request.sequence_id, end, certain_end=certain):
                    break
            step.num_scheduled_tokens[request] -= len(drafts) - kept
            step.num_tokens -= len(drafts) - kept
            del drafts[kept:]

    def _run_prompts(self, step: ScheduledStep) -> bool:
        """Chunks for running requests; False when one got none: newcomers would take what it
        waits for (unchunked: the budget).
        """
        return all(
            self._run(step, request, request.num_uncomputed_tokens)
            for request in [r for r in self.running if not r.is_decoding]
        )

    def _chunk(self, step: ScheduledStep, wanted: int) -> int:
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
        if request.needs_prompt_logits and not request.scoring and self.enable_chunked_prefill:
            wanted = min(wanted, MAX_PROMPT_LOGITS)
        num_tokens = self._chunk(step, wanted)
        while num_tokens:
            num_tokens = self._allocate(request, num_tokens)
            if num_tokens > 0:
                step.num_scheduled_tokens[request] = num_tokens
                step.num_tokens += num_tokens
                return True
            if not may_preempt or not self._preempt_last(step, request):
                return False
            num_tokens = self._chunk(step, wanted)
        return False

    def _allocate(self, request: Request, num_tokens: int) -> int:
        """Get blocks for num_tokens, else for a chunk that ends with the current block, else 0."""
        start, size = request.num_computed_tokens, self.blocks.block_size
        to_block_end = size - start % size
        for chunk in (num_tokens, min(num_tokens, to_block_end)):
            if self.blocks.allocate(request.sequence_id, start + chunk):
                return chunk
        return 0

    # --- admission -----------------------------------------------------------------------------

    def _admit(self, step: ScheduledStep) -> None:
        """Move requests from waiting to running, in their order."""
        if self._chunk(step, 1) == 0:
            return
        put_off = 0
        for request in list(self.waiting):
            if self.num_running + put_off + request.num_samples > self.max_num_seqs:
                return
            hit = self.admitter.match(request)
            if self.admitter.will_hit_more(request, hit, self.running):
                put_off += request.num_samples  # its seat is kept, and the look is bounded
                continue
            wanted = request.num_uncomputed_tokens - hit.num_tokens
            if self._chunk(step, wanted) == 0:
                return
            if not self.admitter.has_room(request, hit, self.running):
                return
            if not self._start(step, request, hit):
                return
            self.waiting.remove(request)
            request.status = RequestStatus.RUNNING
            insort(self.running, request, key=_rank)
            # Never preempts: if blocks lack after all, the request runs in a later step.
            self._run(step, request, wanted, may_preempt=False)

    def _start(self, step: ScheduledStep, request: Request, hit: PrefixHit) -> bool:
        """Give a request the blocks with which it begins; False when they lack."""
        if request.status is RequestStatus.SWAPPED:
            table = self.swap.table(request.sequence_id)
            restored = self.blocks.swap_in(
                request.sequence_id, table, request.token_ids, request.cache_salt
            )
            if restored is None:
                return False
            step.swap_ins[request] = restored
            return True
        self.blocks.adopt(request.sequence_id, hit)
        request.num_computed_tokens = hit.num_tokens
        if not request.num_preemptions and not request.needs_prompt_logits:
            request.num_cached_tokens = hit.num_tokens
            self.num_prefix_queries += request.num_tokens
            self.num_prefix_hits += hit.num_tokens
        return True

    # --- preemption ----------------------------------------------------------------------------

    def _preempt_last(self, step: ScheduledStep, request: Request) -> bool:
        """Take the last request's blocks; False when that is `request` itself."""
        victim = self.running.pop()
        step.num_tokens -= step.num_scheduled_tokens.pop(victim, 0)
        step.preempted.append(victim)
        victim.draft_token_ids.clear()
        victim.num_preemptions += 1
        self.num_preemptions += 1
        if self._should_swap(victim):
            table, ids = self.blocks.swap_out(victim.sequence_id)
            self.swap.reserve(victim.sequence_id, table)
            victim.status = RequestStatus.SWAPPED
            step.swap_outs[victim] = ids
            self.num_swaps += 1
        else:
            self._release(victim)
        self._wait(victim)
        return victim is not request

    def _should_swap(self, victim: Request) -> bool:
        """Whether to keep the victim's K/V on the host. What others hold, too, would be found
        in the cache again, and needn't be recomputed.
        """
        if not victim.num_computed_tokens:
            return False
        num_bytes = self.swap.size(self.blocks.held_by(victim.sequence_id))
        shared = 0
        if self.blocks.prefix_caching and not victim.needs_prompt_logits:
            shared = self.blocks.num_shared_tokens(victim.sequence_id)
        tokens = victim.num_computed_tokens - shared
        return self.policy.prefers_swap(tokens, num_bytes) and self.swap.has_room(num_bytes)


def _lead(leader: Request, followers: Sequence[Request]) -> None:
    leader.followers = list(followers)
    for request in followers:
        request.leader = leader


def _rank(request: Request) -> tuple[float, int, int]:
    return request.rank
