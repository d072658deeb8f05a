"""A drafter with a model, on fake executors: a draft that equals the target is always right."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from qdeploy.kv.config import KVCacheConfig
from qdeploy.runtime.batch import StepBatch
from qdeploy.runtime.engine import Engine
from qdeploy.runtime.engine_config import EngineConfig
from qdeploy.runtime.outputs import RequestOutput
from qdeploy.runtime.request import Request
from qdeploy.runtime.sampling_params import SamplingParams
from qdeploy.runtime.speculation.base import Drafter
from qdeploy.runtime.speculation.draft_model import ModelDrafter
from qdeploy.runtime.speculation.loading import make_model_drafter
from runtime.fake_executor import VOCAB, FakeExecutor
from runtime.storm import Storm, storms
from speculation.stress import Answers, assert_drafts_change_nothing, every_draft, speculating

__all__ = ["every_draft"]
KV = KVCacheConfig(dtype="int4", block_size=8)


class Noisy(FakeExecutor):
    """Logits a little off; with another number of them, if asked."""

    noise, rows = 1.0, VOCAB

    def execute(self, batch: StepBatch) -> Tensor:
        logits = super().execute(batch)
        noise = torch.randn(
            logits.shape, generator=torch.Generator().manual_seed(len(self.batches))
        )
        logits = logits + self.noise * noise
        return torch.nn.functional.pad(logits, (0, self.rows - VOCAB), value=50.0)


def engine(
    draft: FakeExecutor | None = None, *, kv: KVCacheConfig = KV, drafts: int = 4, **options: int
) -> Engine:
    target = FakeExecutor(kv)
    config = EngineConfig(kv=kv, **options)
    if draft is None:
        return Engine(target, config)
    config = speculating(config, drafts, "draft_model")
    drafter = make_model_drafter(draft, config, target, frozenset())
    return Engine(target, config, drafter=drafter)


def run(e: Engine, prompts: dict[str, list[int]], params: SamplingParams) -> dict[str, list[int]]:
    for name, prompt in prompts.items():
        e.add_request(name, prompt, params)
    return drain(e)


def drain(e: Engine) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    while e.has_unfinished:
        collect(e.step(), found)
        e.scheduler.check_integrity()
        drafter_of(e)._blocks.check_integrity() if e.speculator else None
    return found


def collect(outputs: list[RequestOutput], found: dict[str, list[int]]) -> None:
    for output in outputs:
        found.setdefault(f"{output.request_id}/{output.index}", []).extend(output.token_ids)


def drafter_of(e: Engine) -> ModelDrafter:
    assert e.speculator is not None
    assert isinstance(e.speculator.drafter, ModelDrafter)
    return e.speculator.drafter


@pytest.mark.usefixtures("every_draft")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("dtype", ["int4", "bf16"])
def test_r12_a_draft_that_equals_the_target_is_always_right(temperature: float, dtype: str) -> None:
    kv = replace(KV, dtype=dtype)
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=200, min_tokens=150)
    e = engine(FakeExecutor(kv), kv=kv)
    found = run(e, {"a": [1, 2, 3]}, params)
    assert found == run(engine(kv=kv), {"a": [1, 2, 3]}, params)
    stats = e.stats().speculation
    assert stats.num_accepted_tokens == stats.num_draft_tokens == 159
    assert e.stats().num_steps == 41


@pytest.mark.usefixtures("every_draft")
def test_r12_acceptance_stays_when_the_batch_grows_and_shrinks() -> None:
    """Batch 1 → 8 → 1, and steps without drafts in between."""
    e, params = engine(FakeExecutor(KV)), SamplingParams(temperature=0.7, seed=3, max_tokens=120)
    e.add_request("long", [5] * 20, params)
    found: dict[str, list[int]] = {}
    for _ in range(5):
        collect(e.step(), found)
    for i in range(7):
        e.add_request(f"r{i}", [i] * (10 + i), replace(params, max_tokens=20))
    assert e.speculator is not None
    limit, e.speculator._max_drafts = e.speculator._max_drafts, 0
    for _ in range(9):
        collect(e.step(), found)
    e.speculator._max_drafts = limit
    for name, tokens in drain(e).items():
        found.setdefault(name, []).extend(tokens)
    stats = e.stats().speculation
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 100
    assert found["long/0"] == run(engine(), {"long": [5] * 20}, params)["long/0"]


@pytest.mark.usefixtures("every_draft")
def test_a_draft_that_is_off_is_often_right_at_the_same_noise() -> None:
    params = SamplingParams(temperature=1, seed=1, max_tokens=200)
    e = engine(Noisy(KV))
    assert run(e, {"a": [1, 2, 3]}, params) == run(engine(), {"a": [1, 2, 3]}, params)
    stats = e.stats().speculation
    # Independent noise would leave about the 0.1 that two draws of 32 tokens agree by chance.
    assert 0.3 < stats.num_accepted_tokens / stats.num_draft_tokens < 0.95


@pytest.mark.usefixtures("every_draft")
@pytest.mark.parametrize("rows", [VOCAB - 4, VOCAB + 8], ids=["fewer rows", "padded rows"])
def test_embeddings_may_be_padded_differently(rows: int) -> None:
    draft = Noisy(KV)
    draft.noise, draft.rows = 0.0, rows
    params = SamplingParams(temperature=0, max_tokens=60, logit_bias={VOCAB - 1: 1.0})
    e = engine(draft)
    assert run(e, {"a": [1, 2, 3]}, params) == run(engine(), {"a": [1, 2, 3]}, params)
    assert e.stats().speculation.num_accepted_tokens > 30


@pytest.mark.usefixtures("every_draft")
def test_a_draft_with_broken_logits_drafts_nothing() -> None:
    draft = FakeExecutor(KV)
    draft.nan_token = 3
    params = SamplingParams(temperature=0, max_tokens=30)
    e = engine(draft)
    assert run(e, {"a": [1, 2, 3]}, params) == run(engine(), {"a": [1, 2, 3]}, params)
    assert e.stats().speculation.num_drafts == 0


@pytest.mark.usefixtures("every_draft")
def test_a_long_prompt_is_read_in_chunks_and_then_drafted() -> None:
    draft = FakeExecutor(KV)
    e = engine(draft, max_num_batched_tokens=16)
    prompt = [t % VOCAB for t in range(100)]
    params = SamplingParams(temperature=0, max_tokens=60)
    assert run(e, {"a": prompt}, params) == run(engine(), {"a": prompt}, params)
    assert max(batch.num_tokens for batch in draft.batches) <= 16
    stats = e.stats().speculation
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 30


@pytest.mark.usefixtures("every_draft")
def test_prompts_share_prefixes_in_the_draft_too() -> None:
    draft = FakeExecutor(KV)
    e, params = engine(draft), SamplingParams(temperature=0, max_tokens=6)
    prompt = [t % VOCAB for t in range(64)]
    run(e, {"a": prompt}, params)
    before = sum(batch.num_tokens for batch in draft.batches)
    run(e, {"b": [*prompt, 1]}, params)
    assert before >= 64
    assert sum(batch.num_tokens for batch in draft.batches) - before < 24


@pytest.mark.usefixtures("every_draft")
def test_a_cached_prefix_may_reach_into_the_answer() -> None:
    """Another request's first answer token filled the block; reading starts after it."""
    e, params = engine(FakeExecutor(KV)), SamplingParams(temperature=0, max_tokens=20)
    prompt = [1] * (2 * KV.block_size - 1)
    expected = run(e, {"a": prompt}, params)["a/0"]
    assert e.speculator is not None
    e.add_request("b", prompt, params)
    found: dict[str, list[int]] = {}
    limit, e.speculator._max_drafts = e.speculator._max_drafts, 0
    for _ in range(2):
        collect(e.step(), found)
    e.speculator._max_drafts = limit
    rest = drain(e)["b/0"]
    assert found["b/0"] + rest == expected
    assert e.speculator.drafter is not None, "the drafter failed"


@pytest.mark.usefixtures("every_draft")
def test_without_blocks_for_everybody_some_aren_t_drafted() -> None:
    e = engine(FakeExecutor(KV), max_model_len=64, num_kv_blocks=10, max_num_seqs=4)
    prompts = {name: [i] * 30 for i, name in enumerate("abcd")}
    params = SamplingParams(temperature=0, max_tokens=30)
    assert run(e, prompts, params) == run(engine(max_model_len=64), prompts, params)
    assert e.stats().speculation.num_accepted_tokens > 0


@pytest.mark.usefixtures("every_draft")
def test_everything_is_free_or_cached_in_the_end() -> None:
    e = engine(FakeExecutor(KV))
    run(e, {"a": [1] * 30, "b": [2] * 3}, SamplingParams(n=2, seed=1, max_tokens=30))
    blocks = drafter_of(e)._blocks
    assert not blocks.tables
    assert all(pool.num_live == 0 for pool in blocks.pools)
    assert not drafter_of(e)._sequences


@pytest.mark.usefixtures("every_draft")
@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    storm=storms(VOCAB, block_size=8, max_model_len=64, max_arrivals=4),
    drafts=st.sampled_from([1, 3, 9]),
    residual=st.integers(0, 1),
    noisy=st.booleans(),
)
def test_storms_with_a_draft_model(storm: Storm, drafts: int, residual: int, noisy: bool) -> None:
    draft_kv = replace(KV, residual_blocks=residual)

    def make(config: EngineConfig, drafter: Drafter | None) -> Engine:
        return Engine(FakeExecutor(config.kv), config, frozenset({5}), drafter=drafter)

    def drafter(config: EngineConfig, _: Answers) -> Drafter:
        draft = Noisy(draft_kv) if noisy else FakeExecutor(draft_kv)
        return make_model_drafter(draft, config, FakeExecutor(config.kv), frozenset({5}))

    engine = assert_drafts_change_nothing(storm, make, drafter, drafts, "draft_model")
    drafter_of(engine)._blocks.check_integrity()
    assert not drafter_of(engine)._blocks.tables


def test_a_salt_keeps_tenants_apart_in_the_drafts_cache_too() -> None:
    e, prompt = engine(FakeExecutor(KV)), list(range(1, 30))
    blocks = drafter_of(e)._blocks
    request = Request(
        request_id="a",
        order=0,
        prompt_token_ids=prompt,
        params=SamplingParams(),
        max_tokens=9,
        cache_salt="s",
    )
    drafter_of(e).propose([request], [1])
    drafter_of(e).forget(request)
    assert blocks.match(prompt).num_tokens == 0
    assert blocks.match(prompt, "s").num_tokens == 24


@pytest.mark.usefixtures("every_draft")
def test_without_prefix_caching_the_draft_keeps_nothing_either() -> None:
    e = engine(FakeExecutor(KV), enable_prefix_caching=False)
    run(e, {"a": list(range(1, 30))}, SamplingParams(temperature=0, max_tokens=20))
    assert not any(pool.num_cached for pool in drafter_of(e)._blocks.pools)
