from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from qdeploy.errors import CapacityError, UsageError
from qdeploy.kv.config import KVCacheConfig
from qdeploy.kv.groups import KVGroup, KVPoolSize
from qdeploy.runtime.batch import SequenceSlice
from qdeploy.runtime.block_manager import BlockManager
from qdeploy.runtime.preemption import PREEMPTION_MODES, PreemptionPolicy
from qdeploy.runtime.prefix_cache import PrefixHit
from qdeploy.runtime.request import PRIORITY_SECONDS, Request, RequestStatus
from qdeploy.runtime.sampling_params import SamplingParams
from qdeploy.runtime.scheduler import ScheduledStep, Scheduler
from qdeploy.runtime.swap_space import SwapSpace

LONGEST = 64


def make(
    name: str,
    order: int,
    prompt: int | tuple[int, ...],
    max_tokens: int,
    index: int = 0,
    *,
    scoring: bool = False,
    priority: int = 0,
    salt: str = "",
    at: float = 0.0,
) -> Request:
    """A number stands for a prompt of that length that shares no block with any other."""
    return Request(
        request_id=name,
        index=index,
        order=order,
        prompt_token_ids=(1000 + order,) * prompt if isinstance(prompt, int) else prompt,
        params=SamplingParams(),
        max_tokens=max_tokens,
        scoring=scoring,
        priority=priority,
        cache_salt=salt,
        arrival_time=at,
    )


def scheduler(
    kv: KVCacheConfig | None = None,
    *,
    extra: int = 0,
    seqs: int = 4,
    tokens: int = 16,
    window: int = 0,
    mode: str = "recompute",
    swap_bytes: int = 0,
) -> Scheduler:
    """Pools for LONGEST tokens and `extra` open blocks more; every block has one byte."""
    kv = kv or KVCacheConfig(dtype="int4", block_size=8)
    groups = [KVGroup(layers=(0,), config=kv)]
    groups += [KVGroup(layers=(1,), config=kv, window=window)] if window else []
    sizes = []
    for group in groups:
        num_open, num_sealed = group.blocks_for_tokens(LONGEST)
        sizes.append(KVPoolSize(num_open_blocks=num_open + extra, num_sealed_blocks=num_sealed))
    return Scheduler(
        BlockManager(groups, sizes),
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        policy=PreemptionPolicy(mode=mode),
        swap=SwapSpace(swap_bytes, [1] * 2 * len(groups)),
    )


def move(s: Scheduler, step: ScheduledStep) -> None:
    """What the engine does with bytes."""
    for request, ids in step.swap_outs.items():
        count = sum(len(part.open) + len(part.sealed) for part in ids)
        s.swap.fill(request.sequence_id, np.zeros(count, np.uint8))
    for request, restored in step.swap_ins.items():
        count = sum(len(part.open) + len(part.sealed) for part in restored.ids)
        assert len(s.swap.take(request.sequence_id, restored.rows)) == count


class SchedulerMachine(RuleBasedStateMachine):
    """Model: the set of unfinished requests."""

    @initialize(
        kv=st.builds(
            KVCacheConfig,
            dtype=st.sampled_from(["bf16", "int8"]),
            block_size=st.just(8),
            sink_blocks=st.integers(0, 1),
            residual_blocks=st.integers(0, 1),
        ),
        extra=st.sampled_from([0, 0, 0, 1, 2, 6]),
        seqs=st.integers(1, 4),
        tokens=st.integers(1, 24),
        chunked=st.booleans(),
        window=st.sampled_from([0, 0, 5, 20]),
        mode=st.sampled_from(PREEMPTION_MODES),
        swap_bytes=st.sampled_from([0, 6, 20, 10**6]),
    )
    def create(
        self,
        kv: KVCacheConfig,
        extra: int,
        seqs: int,
        tokens: int,
        chunked: bool,
        window: int,
        mode: str,
        swap_bytes: int,
    ) -> None:
        self.scheduler = scheduler(
            kv,
            extra=extra,
            seqs=seqs,
            tokens=tokens if chunked else LONGEST,
            window=window,
            mode=mode,
            swap_bytes=swap_bytes,
        )
        self.scheduler.enable_chunked_prefill = chunked
        self.alive: set[Request] = set()
        self.count = 0

    @rule(
        prompt=st.integers(1, 40),
        kind=st.integers(0, 2),
        max_tokens=st.integers(1, 24),
        n=st.integers(1, 5),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
    )
    def add(self, prompt: int, kind: int, max_tokens: int, n: int, priority: int) -> None:
        self.count += 1
        tokens = (kind,) * prompt
        name = f"r{self.count}"
        samples = [
            make(name, self.count, tokens, max_tokens, i, priority=priority) for i in range(n)
        ]
        if n > self.scheduler.max_num_seqs:
            with pytest.raises(UsageError, match="max_num_seqs"):
                self.scheduler.add(samples)
            return
        self.scheduler.add(samples)
        self.alive |= set(samples)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.alive:
            victim = data.draw(st.sampled_from(sorted(self.alive, key=lambda r: r.rank)))
            self.scheduler.finish(victim)
            self.alive.remove(victim)
            self.scheduler.finish(victim)  # harmless when repeated

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        for request in self.scheduler.running:
            if request.is_decoding:
                request.draft_token_ids = data.draw(st.lists(st.just(2), max_size=12))
        self.one_step(lambda n: data.draw(st.integers(0, n)), fails=data.draw(st.integers(0, 9)))

    def one_step(self, accept: Callable[[int], int], fails: int = -1) -> None:
        first = self.scheduler.running[0] if self.scheduler.running else None
        urgent = first if first is not None and first.is_decoding else None
        waited = set(self.scheduler.waiting)
        step = self.scheduler.schedule()
        assert bool(step.num_scheduled_tokens) == bool(self.alive), "a step without progress"
        assert step.num_tokens == sum(step.num_scheduled_tokens.values())
        assert urgent is None or urgent in step.num_scheduled_tokens
        assert not (step.preempted and waited & set(step.num_scheduled_tokens)), "admitted"
        if fails == 0:
            for request in [*step.swap_outs, *step.swap_ins]:
                self.scheduler.restart(step, request)
        else:
            move(self.scheduler, step)
        batch = self.scheduler.batch(step)
        assert batch.num_tokens == step.num_tokens <= self.scheduler.max_num_batched_tokens
        for (request, count), part in zip(
            step.num_scheduled_tokens.items(), batch.slices, strict=True
        ):
            self.compute(request, count, part, accept)

    def compute(
        self, request: Request, count: int, part: SequenceSlice, accept: Callable[[int], int]
    ) -> None:
        drafts = list(request.draft_token_ids)
        known = count - len(drafts)
        ends = request.num_computed_tokens + known == request.num_tokens
        assert len(part.token_ids) == count
        assert part.num_logits == (1 + len(drafts) if ends else 0)
        accepted = accept(len(drafts))
        for token in drafts[:accepted]:
            request.append(token, 0.0)
        request.draft_token_ids = []
        self.scheduler.commit(request, known + accepted)
        if not ends:
            assert not drafts
            return
        for sample in [request, *self.scheduler.fork(request)]:
            sample.append(2, 0.0)
            assert sample.num_output_tokens <= sample.max_tokens
            if sample.num_output_tokens == sample.max_tokens:
                self.scheduler.finish(sample)
                self.alive.remove(sample)

    @invariant()
    def integrity(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()
            held = [
                sample
                for leader in self.scheduler.waiting + self.scheduler.running
                for sample in (leader, *leader.followers)
            ]
            assert len(held) == len(set(held))
            assert set(held) == self.alive
            for table in self.scheduler.blocks.tables.values():
                if table.num_tokens % 8:
                    assert all(ids[table.num_tokens // 8] >= 0 for ids in table.columns[::2])

    def teardown(self) -> None:
        """Whatever happened before, everything left finishes and every block comes back."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(5_000):
            if not self.alive:
                break
            self.one_step(lambda n: n)
        assert not self.alive, "the scheduler doesn't terminate"
        assert all(pool.num_live == 0 for pool in self.scheduler.blocks.pools)
        assert self.scheduler.swap.num_used_bytes == 0


SchedulerMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None
)
TestSchedulerMachine = SchedulerMachine.TestCase


def run(s: Scheduler) -> dict[str, int]:
    step = s.schedule()
    move(s, step)
    for request, count in step.num_scheduled_tokens.items():
        s.commit(request, count)
        if request.num_uncomputed_tokens == 0:
            for sample in [request, *s.fork(request)]:
                sample.append(2, 0.0)
    return {r.sequence_id: n for r, n in step.num_scheduled_tokens.items()}


def test_decodes_come_before_prompt_chunks() -> None:
    s = scheduler(extra=9)
    s.add([make("a", 0, 10, 8)])
    assert run(s) == {"a/0": 10}
    s.add([make("b", 1, 30, 8)])
    assert run(s) == {"a/0": 1, "b/0": 15}
    assert run(s) == {"a/0": 1, "b/0": 15}
    assert run(s) == {"a/0": 1, "b/0": 1}


def test_r24_samples_are_admitted_all_or_nothing() -> None:
    s = scheduler(extra=20, seqs=5)
    s.add([make("a", 0, 4, 8), make("a", 0, 4, 8, 1)])
    s.add([make("b", 1, 4, 8, i) for i in range(4)])
    assert (s.num_running, s.num_waiting) == (0, 6)
    assert run(s) == {"a/0": 4}
    assert {r.request_id for r in s.running} == {"a"}
    for request in list(s.running):
        s.finish(request)
    assert run(s) == {"b/0": 4}, "the prompt is computed once"
    assert [r.sequence_id for r in s.running] == [f"b/{i}" for i in range(4)]


def test_r26_a_request_that_can_never_fit_is_refused() -> None:
    with pytest.raises(CapacityError, match="raise kv_cache_memory"):
        scheduler().add([make("a", 0, LONGEST, 16)])


def test_the_newest_is_preempted_and_resumes_in_order() -> None:
    s = scheduler(KVCacheConfig(block_size=8), seqs=3, tokens=64)  # 8 open blocks
    old, new = make("old", 0, 24, 40), make("new", 1, 24, 8)
    s.add([old])
    s.add([new])
    while not new.num_preemptions:
        run(s)
    assert new.status is RequestStatus.WAITING
    assert new.num_computed_tokens == 0
    assert old.num_preemptions == 0
    while old.num_output_tokens < 40:
        assert "new/0" not in run(s) or new.num_tokens > 24
    s.finish(old)
    assert run(s) == {"new/0": new.num_prompt_tokens + new.num_output_tokens - 1}


def test_scoring_wants_each_position_once() -> None:
    s = scheduler()
    request = make("a", 0, 20, 0, scoring=True)
    s.add([request])
    step = s.schedule()
    assert s.batch(step).num_logits == 16
    request.num_scored = 10
    assert s.batch(step).num_logits == 6


@pytest.mark.parametrize("residual", [0, 1, 2])
def test_alone_in_the_smallest_cache_every_step_progresses(residual: int) -> None:
    """A chunk across blocks needs more open blocks than there are: it ends at a block's end."""
    s = scheduler(KVCacheConfig(dtype="int8", block_size=8, residual_blocks=residual), tokens=12)
    request = make("a", 0, 50, 8)
    s.add([request])
    while request.num_output_tokens < 8:
        assert run(s)
    assert s.num_preemptions == 0


def test_a_victim_leaves_the_step_in_which_it_was_scheduled() -> None:
    s = scheduler(KVCacheConfig(block_size=8), seqs=2, tokens=20)  # 8 open blocks
    new, old = make("new", 1, 16, 40), make("old", 0, 56, 4)
    s.add([new])
    run(s)
    s.add([old])
    s.admitter.has_room = lambda *_: True  # type: ignore[method-assign]
    while not new.num_preemptions:
        assert "old/0" in run(s)
        s.check_integrity()
    assert old.num_preemptions == 0


def test_newcomers_do_not_pass_an_unchunked_prompt_that_waits_for_the_budget() -> None:
    s = scheduler(KVCacheConfig(block_size=8), extra=60, seqs=8, tokens=LONGEST)
    s.enable_chunked_prefill = False
    s.add([make("d", 0, 4, 40, i) for i in range(2)])
    run(s)
    for order, name in enumerate(("big", "too", "new"), 1):
        s.add([make(name, order, 4 if name == "new" else LONGEST - 2, 2)])
    s.admitter.has_room = lambda *_: True  # type: ignore[method-assign]
    assert run(s) == {"d/0": 1, "d/1": 1, "big/0": LONGEST - 2}
    s.running.insert(3, s.waiting.pop(0))
    s.running[3].status = RequestStatus.RUNNING
    assert run(s) == {"d/0": 1, "d/1": 1, "big/0": 1}, "61 tokens are left, too/0 needs 62"
    s.finish(next(r for r in s.running if r.sequence_id == "big/0"))
    assert "too/0" in run(s)


def names(s: Scheduler) -> list[str]:
    return [r.request_id for r in s.waiting]


def test_priorities_order_and_age_by_themselves() -> None:
    s = scheduler(seqs=1)
    s.add([make("running", 0, 8, 8)])
    run(s)
    s.add([make("late", 4, 8, 8, priority=1, at=10.0)])
    s.add([make("urgent", 3, 8, 8, priority=-1, at=9.0)])
    s.add([make("first", 1, 8, 8, at=1.0)])
    s.add([make("second", 2, 8, 8, at=2.0)])
    s.add([make("much later", 5, 8, 8, at=11.0 + PRIORITY_SECONDS)])
    assert names(s) == ["urgent", "first", "second", "late", "much later"]


def test_the_least_urgent_is_preempted() -> None:
    s = scheduler(KVCacheConfig(block_size=8), seqs=2, tokens=64)  # 8 open blocks
    old, urgent = make("old", 0, 24, 30), make("urgent", 1, 24, 30, priority=-1)
    s.add([old])
    s.add([urgent])
    while not old.num_preemptions:
        run(s)
    assert urgent.num_preemptions == 0


def test_drafts_come_before_prompts() -> None:
    s = scheduler(KVCacheConfig(block_size=8), seqs=2, tokens=20)
    a, b = make("a", 0, 7, 20), make("b", 1, 40, 4)
    s.add([a])
    run(s)
    s.add([b])
    a.draft_token_ids = [7] * 9
    step = s.schedule()
    assert step.num_scheduled_tokens == {a: 10, b: 10}
    part = s.batch(step).slices[0]
    assert (list(part.token_ids), part.num_logits) == ([2, *[7] * 9], 10)
    a.append(7, 0.0)  # one is accepted
    s.commit(a, 2)
    s.check_integrity()


def test_drafts_that_find_no_blocks_are_dropped() -> None:
    s = scheduler(KVCacheConfig(block_size=8), seqs=2, tokens=64)  # 8 open blocks
    a, b = make("a", 0, 4, 20), make("b", 1, 54, 4)
    s.add([a])
    s.add([b])
    run(s)
    run(s)
    assert s.blocks.pools[0].num_available == 0
    a.draft_token_ids = [7] * 15
    step = s.schedule()
    assert step.num_scheduled_tokens == {a: 2, b: 1}, "one is left in a's block"
    assert (a.draft_token_ids, step.preempted, step.num_tokens) == ([7], [], 3)


def test_drafts_end_where_the_request_ends() -> None:
    s = scheduler()
    a = make("a", 0, 4, 3)
    s.add([a])
    run(s)
    a.draft_token_ids = [5] * 8
    assert s.schedule().num_scheduled_tokens == {a: 2}


def test_admission_counts_what_prompts_in_progress_still_need() -> None:
    s = scheduler(KVCacheConfig(block_size=8), seqs=3, tokens=10)  # 8 open blocks
    s.add([make("a", 0, 30, 4)])
    run(s)
    s.add([make("b", 1, 30, 4)])
    assert run(s) == {"a/0": 10}
    assert s.blocks.pools[0].num_available == 5, "enough for b now, not when a is computed"
    s.finish(s.running[0])
    assert run(s) == {"b/0": 10}


def test_r08_equal_prompts_at_once_are_computed_once() -> None:
    s = scheduler(KVCacheConfig(block_size=8), extra=20, tokens=64)
    tokens = tuple(range(40))
    s.add([make("a", 0, tokens, 4)])
    s.add([make("b", 1, tokens, 4)])
    s.add([make("c", 2, (1, 2, 3), 4)])
    s.add([make("d", 3, tokens, 4, salt="other")])
    assert run(s) == {"a/0": 40, "c/0": 3, "d/0": 21}
    assert run(s) == {"a/0": 1, "c/0": 1, "b/0": 8, "d/0": 19}
    assert [r.num_cached_tokens for r in s.running] == [0, 32, 0, 0]
    assert (s.num_prefix_queries, s.num_prefix_hits) == (40 + 40 + 3 + 40, 32)


def test_r08_a_long_queue_of_equal_prompts_is_not_searched_in_each_step() -> None:
    """256 waiting prompts of 8,000 tokens once cost 200 ms a step, in which nobody decoded."""
    s = scheduler(KVCacheConfig(block_size=8), extra=20, tokens=8)
    tokens, looked_at = tuple(range(40)), list[str]()
    for order in range(20):
        s.add([make(f"r{order}", order, tokens, 4)])
    s.add([make("other", 20, (1, 2, 3), 4)])
    match = s.admitter.match

    def counted(request: Request) -> PrefixHit:
        looked_at.append(request.request_id)
        return match(request)

    s.admitter.match = counted  # type: ignore[method-assign]
    assert run(s) == {"r0/0": 8}
    looked_at.clear()  # r0 itself was
    assert run(s) == {"r0/0": 8}
    assert looked_at == [], "the budget is spent"
    s.max_num_batched_tokens = 64
    assert run(s) == {"r0/0": 24}
    assert looked_at == ["r1", "r2", "r3"], "as many as there are seats"


def test_a_request_that_wants_all_logits_takes_nothing_from_the_cache() -> None:
    s = scheduler(extra=8, tokens=64)
    tokens = tuple(range(40))
    s.add([make("a", 0, tokens, 0, scoring=True)])
    run(s)
    s.finish(s.running[0])
    s.add([make("b", 1, tokens, 0, scoring=True)])
    assert run(s) == {"b/0": 40}
    s.add([make("c", 2, tokens, 4)])
    assert run(s)["c/0"] == 8, "but leaves it there"


def pressed(mode: str, swap_bytes: int) -> tuple[Scheduler, Request, Request]:
    """Two requests that don't fit together; returns after the second was preempted."""
    s = scheduler(KVCacheConfig(block_size=8), tokens=64, mode=mode, swap_bytes=swap_bytes)
    old, new = make("old", 0, 24, 40), make("new", 1, 24, 8)
    s.add([old])
    s.add([new])
    while not new.num_preemptions:
        run(s)
    return s, old, new


def test_a_swapped_request_resumes_where_it_was() -> None:
    s, old, new = pressed("swap", 100)
    assert (new.status, s.num_swaps) == (RequestStatus.SWAPPED, 1)
    computed = new.num_computed_tokens
    assert s.swap.num_used_bytes == 4
    s.finish(old)
    assert run(s) == {"new/0": 1}
    assert new.num_computed_tokens == computed + 1
    assert s.swap.num_used_bytes == 0


@pytest.mark.parametrize(("mode", "room"), [("swap", 3), ("recompute", 100)])
def test_r09_without_room_it_is_recomputed(mode: str, room: int) -> None:
    s, old, new = pressed(mode, room)
    assert (new.status, s.num_swaps) == (RequestStatus.WAITING, 0)
    s.finish(old)
    assert run(s)["new/0"] <= new.num_tokens
    s.check_integrity()


def test_auto_takes_the_cheaper_way() -> None:
    policy = PreemptionPolicy()
    policy.note_step(100, 100, 1.0)  # 10 ms a token
    policy.note_copy(10**6, 1.0)  # 1 us a byte
    assert policy.prefers_swap(100, 400_000)
    assert not policy.prefers_swap(100, 600_000)
    for _ in range(40):
        policy.note_copy(10**6, 3.0)
    assert not policy.prefers_swap(100, 400_000)
    policy.note_step(1, 32, 9.0)
    assert policy.seconds_per_token == 0.01, "decoding says nothing about prompts"


def test_a_lost_leader_leaves_the_rest_to_another() -> None:
    s = scheduler(extra=8, tokens=8)
    samples = [make("a", 0, 20, 4, i) for i in range(3)]
    s.add(samples)
    run(s)
    s.finish(samples[0])
    s.check_integrity()
    assert s.num_waiting == 2
    run(s)
    assert s.running == [samples[1]]
    s.finish(samples[2])
    s.finish(samples[1])
    assert not s.has_unfinished
    assert all(pool.num_live == 0 for pool in s.blocks.pools)
