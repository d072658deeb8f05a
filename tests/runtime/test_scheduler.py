from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from qdeploy.errors import CapacityError, UsageError
from qdeploy.kv.config import KVCacheConfig
from qdeploy.kv.groups import KVGroup, KVPoolSize
from qdeploy.runtime.block_manager import BlockManager
from qdeploy.runtime.request import Request, RequestStatus
from qdeploy.runtime.sampling_params import SamplingParams
from qdeploy.runtime.scheduler import Scheduler

LONGEST = 64


def make(
    name: str, order: int, prompt: int, max_tokens: int, index: int = 0, *, scoring: bool = False
) -> Request:
    return Request(
        request_id=name,
        index=index,
        order=order,
        prompt_token_ids=(1,) * prompt,
        params=SamplingParams(),
        max_tokens=max_tokens,
        scoring=scoring,
    )


def scheduler(
    kv: KVCacheConfig | None = None, *, extra: int = 0, seqs: int = 4, tokens: int = 16
) -> Scheduler:
    kv = kv or KVCacheConfig(dtype="int4", block_size=8)
    group = KVGroup(layers=(0,), config=kv)
    num_open, num_sealed = group.blocks_for_tokens(LONGEST)
    size = KVPoolSize(num_open_blocks=num_open + extra, num_sealed_blocks=num_sealed)
    blocks = BlockManager([group], [size])
    return Scheduler(blocks, max_num_seqs=seqs, max_num_batched_tokens=tokens)


class SchedulerMachine(RuleBasedStateMachine):
    """Model: the set of unfinished requests, and tokens that each has computed."""

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
    )
    def create(self, kv: KVCacheConfig, extra: int, seqs: int, tokens: int, chunked: bool) -> None:
        self.scheduler = scheduler(kv, extra=extra, seqs=seqs, tokens=tokens)
        self.scheduler.enable_chunked_prefill = chunked
        if not chunked:
            self.scheduler.max_num_batched_tokens = LONGEST
        self.alive: dict[Request, int] = {}
        self.count = 0

    @rule(prompt=st.integers(1, 40), max_tokens=st.integers(1, 24), n=st.integers(1, 5))
    def add(self, prompt: int, max_tokens: int, n: int) -> None:
        self.count += 1
        samples = [make(f"r{self.count}", self.count, prompt, max_tokens, i) for i in range(n)]
        if n > self.scheduler.max_num_seqs:
            with pytest.raises(UsageError, match="max_num_seqs"):
                self.scheduler.add(samples)
            return
        self.scheduler.add(samples)
        self.alive |= dict.fromkeys(samples, 0)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.alive:
            victim = data.draw(st.sampled_from(list(self.alive)))
            self.scheduler.finish(victim)
            del self.alive[victim]
            self.scheduler.finish(victim)  # harmless when repeated

    @rule()
    def step(self) -> None:
        step = self.scheduler.schedule()
        batch = self.scheduler.batch(step)
        assert batch.num_tokens <= self.scheduler.max_num_batched_tokens
        assert bool(step.num_scheduled_tokens) == bool(self.alive), "a step without progress"
        for request in step.preempted:
            self.alive[request] = 0
        if self.alive and not step.preempted:
            oldest = min(self.alive, key=lambda r: (r.order, r.index))
            if all(r.is_decoding for r in step.num_scheduled_tokens) or oldest.is_decoding:
                assert oldest in step.num_scheduled_tokens
        for (request, tokens), part in zip(
            step.num_scheduled_tokens.items(), batch.slices, strict=True
        ):
            assert part.start == self.alive[request]
            self.alive[request] += tokens
            assert (part.num_logits == 1) == (self.alive[request] == request.num_tokens)
        self.scheduler.commit(step)
        for request in list(step.num_scheduled_tokens):
            if request.num_uncomputed_tokens == 0:
                request.append(2, 0.0)
                if request.num_output_tokens == request.max_tokens:
                    self.scheduler.finish(request)
                    del self.alive[request]

    @invariant()
    def integrity(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()
            held = {r for e in self.scheduler.waiting for r in e} | set(self.scheduler.running)
            assert held == set(self.alive)
            assert all(r.num_computed_tokens == n for r, n in self.alive.items())

    def teardown(self) -> None:
        """Whatever happened before, everything left finishes and every block comes back."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(20_000):
            if not self.alive:
                break
            self.step()
        assert not self.alive, "the scheduler doesn't terminate"
        (blocks,) = self.scheduler.blocks.groups
        assert blocks.open_pool.num_used == blocks.sealed_pool.num_used == 0


SchedulerMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=25, deadline=None
)
TestSchedulerMachine = SchedulerMachine.TestCase


def run(s: Scheduler) -> dict[str, int]:
    step = s.schedule()
    s.commit(step)
    for request in step.num_scheduled_tokens:
        if request.num_uncomputed_tokens == 0:
            request.append(2, 0.0)
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
    run(s)
    assert {r.request_id for r in s.running} == {"a"}
    for request in list(s.running):
        s.finish(request)
    run(s)
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
    s._fits_now = lambda entry: True  # type: ignore[method-assign]
    while not new.num_preemptions:
        assert "old/0" in run(s)
        s.check_integrity()
    assert old.num_preemptions == 0


def test_newcomers_do_not_pass_an_unchunked_prompt_that_waits_for_the_budget() -> None:
    s = scheduler(KVCacheConfig(block_size=8), extra=60, seqs=8, tokens=LONGEST)
    s.enable_chunked_prefill = False
    s.add([make("d", 0, 4, 40, i) for i in range(2)])
    run(s)
    s.add([make("big", 1, LONGEST - 2, 2, i) for i in range(2)])
    assert run(s) == {"d/0": 1, "d/1": 1, "big/0": LONGEST - 2}
    s.add([make("new", 2, 4, 40)])
    assert run(s) == {"d/0": 1, "d/1": 1, "big/0": 1}, "61 tokens are left, big/1 needs 62"
    s.finish(next(r for r in s.running if r.sequence_id == "big/0"))
    assert "big/1" in run(s)
