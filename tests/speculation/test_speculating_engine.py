"""Verification in the engine, on an executor that notices every wrong block."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qdeploy.errors import UsageError
from qdeploy.kv.config import KVCacheConfig
from qdeploy.runtime.engine import Engine
from qdeploy.runtime.engine_config import EngineConfig
from qdeploy.runtime.outputs import RequestOutput
from qdeploy.runtime.sampling_params import SamplingParams
from qdeploy.runtime.speculation.base import Drafter
from qdeploy.runtime.speculation.config import SpeculativeConfig
from qdeploy.runtime.speculation.ngram import NgramDrafter
from runtime.fake_executor import VOCAB, FakeExecutor
from runtime.storm import Storm, storms
from speculation.stress import (
    Answers,
    StressDrafter,
    assert_drafts_change_nothing,
    every_draft,
    speculating,
)

__all__ = ["every_draft"]
KV = KVCacheConfig(dtype="int4", block_size=8)
PROMPT = [1, 2, 3, 4, 5]


def engine(
    drafter: Drafter | None = None, *, drafts: int = 4, eos: int = -1, **options: int
) -> Engine:
    config = EngineConfig(kv=KV, **options)
    if drafter is not None:
        config = speculating(config, drafts)
    return Engine(FakeExecutor(KV), config, frozenset({eos}), drafter=drafter)


def run(e: Engine, params: SamplingParams, prompt: list[int] = PROMPT) -> list[RequestOutput]:
    e.add_request("a", prompt, params)
    found = []
    while e.has_unfinished:
        found += e.step()
        e.scheduler.check_integrity()
    return found


def tokens_of(outputs: list[RequestOutput]) -> tuple[int, ...]:
    return tuple(t for o in outputs for t in o.token_ids)


def knowing(params: SamplingParams, *, eos: int = -1) -> tuple[StressDrafter, list[RequestOutput]]:
    """A drafter that is always right, and the outputs without it."""
    plain = run(engine(eos=eos), params)
    # It goes on beyond the end, as a drafter may.
    longer = params.max_tokens is not None and tokens_of(plain) + (7,) * 9
    drafter = StressDrafter({("a", 0): tuple(longer or ())}, VOCAB, 0)
    drafter.random.choice = lambda _: "right"  # type: ignore[method-assign,assignment]
    drafter.random.randint = lambda low, high: high  # type: ignore[method-assign]
    return drafter, plain


@pytest.mark.usefixtures("every_draft")
def test_right_drafts_come_in_one_output_a_step() -> None:
    params = SamplingParams(temperature=0, max_tokens=13)
    drafter, plain = knowing(params)
    e = engine(drafter, drafts=3)
    outputs = run(e, params)
    assert tokens_of(outputs) == tokens_of(plain)
    assert [len(o.token_ids) for o in outputs] == [1, 4, 4, 4]
    assert [o.num_output_tokens for o in outputs] == [1, 5, 9, 13]
    stats = e.stats()
    assert stats.generation_tokens_total == 13
    assert (stats.speculation.num_drafts, stats.speculation.num_draft_tokens) == (3, 9)
    assert stats.speculation.per_position == (3, 3, 3)
    assert stats.speculation.num_accepted_tokens == 9
    assert stats.speculation.acceptance_rate == pytest.approx(1)
    assert drafter.alive == set()


@pytest.mark.usefixtures("every_draft")
@pytest.mark.parametrize("limit", [1, 2, 3, 5, 6])
def test_max_tokens_is_never_exceeded(limit: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=limit)
    drafter, plain = knowing(params)
    outputs = run(engine(drafter, drafts=8), params)
    assert tokens_of(outputs) == tokens_of(plain)
    assert outputs[-1].finish_reason == "length"
    assert outputs[-1].num_output_tokens == limit


@pytest.mark.usefixtures("every_draft")
def test_the_context_is_never_exceeded() -> None:
    params = SamplingParams(temperature=0, max_tokens=11)
    drafter, plain = knowing(params)
    e = engine(drafter, drafts=8, max_model_len=16)
    assert tokens_of(run(e, params)) == tokens_of(plain)


@pytest.mark.usefixtures("every_draft")
def test_r14_nothing_after_eos_inside_an_accepted_block() -> None:
    params = SamplingParams(temperature=0, max_tokens=20)
    eos = tokens_of(run(engine(), params))[6]
    drafter, plain = knowing(params, eos=eos)
    assert len(tokens_of(plain)) <= 7
    e = engine(drafter, drafts=8, eos=eos)
    outputs = run(e, params)
    assert tokens_of(outputs) == tokens_of(plain)
    assert outputs[-1].finish_reason == "stop"
    assert outputs[-1].num_output_tokens == len(tokens_of(plain))
    assert e.stats().generation_tokens_total == len(tokens_of(plain))


@pytest.mark.usefixtures("every_draft")
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, max_tokens=30, logit_bias={3: 8.0, 9: -100.0}),
        SamplingParams(temperature=0, max_tokens=30, repetition_penalty=1.5),
        SamplingParams(temperature=0.7, max_tokens=30, seed=1, frequency_penalty=1.0),
        SamplingParams(temperature=0.7, max_tokens=30, seed=1, presence_penalty=2.0),
        SamplingParams(temperature=1.0, max_tokens=30, seed=2, allowed_token_ids=(1, 2, 3, 4)),
        SamplingParams(temperature=1.0, max_tokens=30, seed=3, min_tokens=25),
        SamplingParams(temperature=1.3, max_tokens=30, seed=4, top_k=5, top_p=0.9, min_p=0.05),
    ],
    ids=lambda p: next(
        n for n in ("logit_bias", "repetition_penalty", "temperature") if getattr(p, n)
    ),
)
def test_r13_processors_apply_at_every_verified_position(params: SamplingParams) -> None:
    plain = run(engine(eos=5), params)
    for seed in range(4):
        drafter = StressDrafter({("a", 0): tokens_of(plain)}, VOCAB, seed)
        assert tokens_of(run(engine(drafter, eos=5), params)) == tokens_of(plain)


@pytest.mark.usefixtures("every_draft")
def test_logprobs_are_those_without_drafts() -> None:
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=12, logprobs=3)
    drafter, plain = knowing(params)
    outputs = run(engine(drafter), params)
    assert max(len(o.token_ids) for o in outputs) == 5
    found = [t for o in outputs for t in o.logprobs or ()]
    assert found == [t for o in plain for t in o.logprobs or ()]
    assert [t.token_id for t in found] == list(tokens_of(plain))


@pytest.mark.usefixtures("every_draft")
def test_non_finite_logits_end_the_request_where_they_would_without_drafts() -> None:
    params = SamplingParams(temperature=0, max_tokens=20)
    drafter, plain = knowing(params)
    poison = tokens_of(plain)[7]
    first = tokens_of(plain).index(poison)
    alone, drafted = engine(), engine(drafter, drafts=8)
    for e in (alone, drafted):
        e.executor.nan_token = poison  # type: ignore[attr-defined]
    expected, found = run(alone, params), run(drafted, params)
    assert tokens_of(found) == tokens_of(expected) == tokens_of(plain)[: first + 1]
    assert found[-1].finish_reason == expected[-1].finish_reason == "error"
    assert found[-1].error == expected[-1].error
    assert "non-finite" in (found[-1].error or "")


def test_a_poisonous_wrong_draft_hurts_nobody() -> None:
    params = SamplingParams(temperature=0, max_tokens=20)
    plain = run(engine(), params)
    poison = next(t for t in range(VOCAB) if t not in {*PROMPT, *tokens_of(plain)})
    drafter = StressDrafter({}, VOCAB, 0)
    drafter.random.randrange = lambda _: poison  # type: ignore[method-assign,assignment]
    e = engine(drafter)
    e.executor.nan_token = poison  # type: ignore[attr-defined]
    assert tokens_of(run(e, params)) == tokens_of(plain)


class Failing(StressDrafter):
    """Fails after some proposals, in one way or another."""

    def __init__(self, failure: Exception | None) -> None:
        super().__init__({}, VOCAB, 0)
        self.left, self.failure = 3, failure

    def propose(self, requests, counts):  # type: ignore[no-untyped-def]
        self.left -= 1
        if self.left:
            return super().propose(requests, counts)
        if self.failure is not None:
            raise self.failure
        return super()._propose(requests[0], 1), super()._propose(requests[0], 1)


@pytest.mark.parametrize("failure", [MemoryError("no\nmemory"), None], ids=["raises", "miscounts"])
def test_p5_a_drafter_that_fails_is_turned_off_and_costs_no_token(
    failure: Exception | None, caplog: pytest.LogCaptureFixture
) -> None:
    params = SamplingParams(temperature=0, max_tokens=20)
    e = engine(Failing(failure))
    assert tokens_of(run(e, params)) == tokens_of(run(engine(), params))
    messages = [r.getMessage() for r in caplog.records if "turned off" in r.getMessage()]
    assert len(messages) == 1
    assert "\n" not in messages[0]


@pytest.mark.usefixtures("every_draft")
def test_an_id_outside_the_vocabulary_turns_the_drafter_off() -> None:
    drafter = StressDrafter({}, VOCAB, 0)
    drafter.random.randrange = lambda _: VOCAB  # type: ignore[method-assign,assignment]
    e = engine(drafter)
    params = SamplingParams(temperature=0, max_tokens=20)
    assert tokens_of(run(e, params)) == tokens_of(run(engine(), params))
    assert e.speculator is not None
    assert e.speculator.drafter is None


def test_an_option_without_its_drafter_is_refused() -> None:
    config = EngineConfig(kv=KV, speculative=SpeculativeConfig(method="ngram"))
    with pytest.raises(UsageError, match="disagree"):
        Engine(FakeExecutor(KV), config)
    with pytest.raises(UsageError, match="disagree"):
        Engine(FakeExecutor(KV), EngineConfig(kv=KV), drafter=NgramDrafter())


def test_r15_the_same_prompt_twenty_times_with_a_prefix_cache() -> None:
    e = engine(NgramDrafter())
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9] * 4
    params = SamplingParams(temperature=0, max_tokens=24)
    plain = tokens_of(run(engine(), params, prompt))
    assert [tokens_of(run(e, params, prompt)) for _ in range(20)] == [plain] * 20


@pytest.mark.usefixtures("every_draft")
@pytest.mark.parametrize("chunk", [5, 32, 64])
def test_r18_chunks_and_drafts_change_nothing(chunk: int) -> None:
    prompt = [t % VOCAB for t in range(120)]
    params = SamplingParams(temperature=0, max_tokens=40)
    plain = tokens_of(run(engine(), params, prompt))
    drafter = StressDrafter({("a", 0): plain}, VOCAB, 3)
    e = engine(drafter, max_num_batched_tokens=chunk)
    assert tokens_of(run(e, params, prompt)) == plain
    assert drafter.num_accepted > 0


@pytest.mark.usefixtures("every_draft")
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    storm=storms(VOCAB, block_size=8, max_model_len=64, max_arrivals=4),
    drafts=st.sampled_from([1, 2, 5, 12]),
    seed=st.integers(0, 9),
)
def test_storms_with_drafts_equal_solo_runs_without(storm: Storm, drafts: int, seed: int) -> None:
    def make(config: EngineConfig, drafter: Drafter | None) -> Engine:
        return Engine(FakeExecutor(config.kv), config, frozenset({5}), drafter=drafter)

    def drafter(_: EngineConfig, answers: Answers) -> StressDrafter:
        return StressDrafter(answers, VOCAB, seed)

    engine = assert_drafts_change_nothing(storm, make, drafter, drafts)
    assert engine.speculator is not None
    assert engine.speculator.drafter.alive == set()  # type: ignore[union-attr]
