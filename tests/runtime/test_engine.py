from __future__ import annotations

import pytest
import torch

from qdeploy.errors import CapacityError, UsageError
from qdeploy.kv.config import KVCacheConfig
from qdeploy.runtime.engine import Engine
from qdeploy.runtime.engine_config import EngineConfig
from qdeploy.runtime.outputs import RequestOutput
from qdeploy.runtime.sampling_params import SamplingParams
from runtime.fake_executor import VOCAB, FakeExecutor

KV = KVCacheConfig(dtype="int4", block_size=8)
GREEDY = SamplingParams(temperature=0, max_tokens=12)


def engine(kv: KVCacheConfig = KV, *, eos: frozenset[int] = frozenset(), **options: int) -> Engine:
    return Engine(FakeExecutor(kv), EngineConfig(kv=kv, **options), eos)


def drain(e: Engine) -> dict[tuple[str, int], list[RequestOutput]]:
    found: dict[tuple[str, int], list[RequestOutput]] = {}
    while e.has_unfinished:
        for output in e.step():
            found.setdefault((output.request_id, output.index), []).append(output)
    e.scheduler.check_integrity()
    stats = e.stats()
    assert stats.num_open_blocks_used == stats.num_sealed_blocks_used == 0
    assert stats.num_requests_running == stats.num_requests_waiting == 0
    return found


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    return [t for o in outputs for t in o.token_ids]


def solo(prompt: list[int], params: SamplingParams, name: str = "a", **options: int) -> list[int]:
    e = engine(**options)
    e.add_request(name, prompt, params)
    return tokens_of(drain(e)[name, 0])


def test_one_request_start_to_end() -> None:
    e = engine()
    e.add_request("a", [1, 2, 3], GREEDY)
    outputs = drain(e)["a", 0]
    assert [o.num_output_tokens for o in outputs] == list(range(1, 13))
    assert [o.finish_reason for o in outputs] == [None] * 11 + ["length"]
    metrics = outputs[-1].metrics
    times = (metrics.arrival_time, metrics.first_scheduled_time, metrics.first_token_time)
    assert None not in times
    assert list(times) == sorted(times)
    stats = e.stats()
    assert (stats.prompt_tokens_total, stats.generation_tokens_total) == (3, 12)
    assert stats.finished == {"length": 1}


def test_x08_neighbours_may_leave_in_any_order() -> None:
    prompts = {"a": list(range(1, 20)), "b": [4] * 40, "c": [5, 6], "d": [7] * 9}
    e = engine()
    for name, prompt in prompts.items():
        e.add_request(
            name, prompt, SamplingParams(temperature=0, max_tokens=1 + 3 * len(prompt) % 20)
        )
    found = drain(e)
    for name, prompt in prompts.items():
        params = SamplingParams(temperature=0, max_tokens=1 + 3 * len(prompt) % 20)
        assert tokens_of(found[name, 0]) == solo(prompt, params, name)


def test_x09_a_longer_neighbour_changes_nothing() -> None:
    e = engine()
    e.add_request("a", [3] * 11, GREEDY)
    e.add_request("long", [4] * 100, GREEDY)
    assert tokens_of(drain(e)["a", 0]) == solo([3] * 11, GREEDY)


@pytest.mark.parametrize("chunk", [5, 32, 64])
def test_r18_chunking_changes_nothing(chunk: int) -> None:
    prompt = [t % VOCAB for t in range(200)]
    assert solo(prompt, GREEDY, max_num_batched_tokens=chunk) == solo(prompt, GREEDY)


def test_r03_greedy_amid_fifteen_others() -> None:
    e = engine()
    for i in range(16):
        e.add_request(str(i), [1 + i] * (5 + i), GREEDY)
    assert tokens_of(drain(e)["7", 0]) == solo([8] * 12, GREEDY, "7")


def test_r19_a_long_prompt_does_not_stall_those_who_decode() -> None:
    """4,000 tokens arrive while four decode: each of them gets a token in every step, and no step
    computes more than the budget.
    """
    kv = KVCacheConfig(dtype="int4", block_size=64)
    config = EngineConfig(kv=kv, max_num_seqs=5, max_num_batched_tokens=256)
    e = Engine(FakeExecutor(kv, max_model_len=4096), config)
    for name in "abcd":
        e.add_request(name, [1, 2, 3], SamplingParams(temperature=0, max_tokens=40))
    e.step()
    e.add_request("long", [t % VOCAB for t in range(4000)], GREEDY)
    steps = 0
    while True:
        outputs = e.step()
        steps += 1
        assert e.stats().last_step_tokens <= 256
        decoded = {o.request_id: len(o.token_ids) for o in outputs if o.request_id != "long"}
        assert decoded == dict.fromkeys("abcd", 1)
        if any(o.request_id == "long" for o in outputs):
            break
    assert steps == 16  # 252 tokens each


def test_x01_non_finite_logits_end_that_request_only() -> None:
    e = engine()
    e.executor.nan_token = 31
    e.add_request("bad", [1, 31, 2], GREEDY)
    e.add_request("good", [1, 2, 3], SamplingParams(max_tokens=5, allowed_token_ids=[1, 2, 3]))
    found = drain(e)
    assert tokens_of(found["bad", 0]) == []
    assert found["bad", 0][0].finish_reason == "error"
    assert "32 non-finite logits of 32" in str(found["bad", 0][0].error)
    assert len(tokens_of(found["good", 0])) == 5


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("out of memory\nat line 3")])
def test_r17_a_failed_step_ends_its_requests_and_the_engine_goes_on(error: Exception) -> None:
    e = engine(max_num_seqs=2)
    for name in "abc":
        e.add_request(name, [1, 2, 3], GREEDY)
    e.step()
    e.executor.fail_next = error
    failed = e.step()
    assert [(o.request_id, o.finish_reason) for o in failed] == [("a", "error"), ("b", "error")]
    assert "\n" not in str(failed[0].error)
    assert tokens_of(drain(e)["c", 0]) == solo([1, 2, 3], GREEDY, "c")


def test_r24_abort_half_way_leaves_nothing_fifty_times() -> None:
    e = engine(max_num_seqs=8)
    for i in range(50):
        e.add_request(f"r{i}", [1, 2, 3], SamplingParams(n=8, max_tokens=40))
        for _ in range(i % 5):
            e.step()
        e.abort(f"r{i}")
        reasons = [o.finish_reason for o in e.step()]
        assert reasons.count("abort") == 8
        assert not e.has_unfinished
        assert e.stats().num_open_blocks_used == 0
    e.abort("unknown")
    assert not drain(e)


def test_r24_eight_samples_wait_for_eight_seats_and_leave_nothing() -> None:
    e = engine(max_num_seqs=12, enable_prefix_caching=False)
    for i in range(50):
        for k in range(7):
            e.add_request(f"s{i}/{k}", [k + 1, 2], SamplingParams(max_tokens=2))
        e.add_request(f"r{i}", [1, 2, 3], SamplingParams(n=8, max_tokens=9, seed=i))
        e.step()
        assert (e.stats().num_requests_running, e.stats().num_requests_waiting) == (7, 8)
        for _ in range(i % 6):
            e.step()
        e.abort(f"r{i}")
        drain(e)
        assert not e.blocks.tables
        assert not e._samples
        assert all(pool.num_free == pool.size for pool in e.blocks.pools)


def test_the_prompt_of_several_samples_is_computed_once() -> None:
    e = engine()
    e.add_request("a", [t % VOCAB for t in range(17)], SamplingParams(n=4, seed=5, max_tokens=8))
    found = drain(e)
    assert [len(b.slices) for b in e.executor.batches] == [1] + [4] * 7
    assert sum(len(b.copies) for b in e.executor.batches) == 3, "the last one keeps the tail"
    assert e.stats().prompt_tokens_total == 17
    again = engine(enable_prefix_caching=False, max_num_seqs=4)
    again.add_request(
        "a", [t % VOCAB for t in range(17)], SamplingParams(n=4, seed=5, max_tokens=8)
    )
    assert {k: tokens_of(o) for k, o in drain(again).items()} == {
        k: tokens_of(o) for k, o in found.items()
    }


def test_a_salt_keeps_prefixes_apart() -> None:
    e = engine()
    prompt = [t % VOCAB for t in range(20)]
    for name, salt, cached in (("a", None, 0), ("b", "x", 0), ("c", "x", 16), ("d", None, 16)):
        e.add_request(name, prompt, SamplingParams(max_tokens=1, cache_salt=salt))
        assert drain(e)[name, 0][0].num_cached_tokens == cached


def test_samples_of_one_request_differ_and_repeat() -> None:
    runs = []
    for _ in range(2):
        e = engine()
        e.add_request("a", [1, 2, 3], SamplingParams(n=4, seed=5, max_tokens=8))
        runs.append({key: tokens_of(o) for key, o in drain(e).items()})
    assert runs[0] == runs[1]
    assert len({tuple(t) for t in runs[0].values()}) == 4


def test_a13_every_eos_token_stops() -> None:
    free = solo([1, 2, 3], GREEDY)
    for position in (2, 5):
        e = engine(eos=frozenset({free[position], 99}))
        e.add_request("a", [1, 2, 3], GREEDY)
        outputs = drain(e)["a", 0]
        first = free.index(free[position])
        assert tokens_of(outputs) == free[: first + 1]
        assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", None)


def test_stop_token_ids_and_ignore_eos_and_min_tokens() -> None:
    free = solo([1, 2, 3], GREEDY)
    eos = frozenset({free[2]})
    e = engine(eos=eos)
    stop = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=[free[6]])
    e.add_request("a", [1, 2, 3], stop)
    e.add_request("b", [1, 2, 3], SamplingParams(temperature=0, max_tokens=12, min_tokens=9))
    found = drain(e)
    assert tokens_of(found["a", 0]) == free[: free.index(free[6]) + 1]
    assert found["a", 0][-1].stop_reason == free[6]
    assert eos.isdisjoint(tokens_of(found["b", 0])[:9])


@pytest.mark.parametrize(
    ("prompt", "params", "kind", "words"),
    [
        ([], GREEDY, UsageError, "no tokens"),
        ([VOCAB], GREEDY, UsageError, "outside the vocabulary 0 … 31"),
        ([1] * 256, GREEDY, CapacityError, "leaves no room in max_model_len=256"),
        ([1] * 250, GREEDY, UsageError, "at most 6"),
        ([1], SamplingParams(n=17), UsageError, "max_num_seqs=16"),
        ([1], SamplingParams(logit_bias={32: 1}), UsageError, "logit_bias"),
        ([1], SamplingParams(allowed_token_ids=[77]), UsageError, "allowed_token_ids"),
        ([1], SamplingParams(stop="x"), UsageError, "need a tokenizer"),
    ],
)
def test_r01_bad_requests_are_refused_and_leave_nothing(
    prompt: list[int], params: SamplingParams, kind: type[Exception], words: str
) -> None:
    e = engine()
    with pytest.raises(kind, match=words):
        e.add_request("a", prompt, params)
    assert not e.has_unfinished
    e.add_request("a", [1], GREEDY)
    with pytest.raises(UsageError, match="in use"):
        e.add_request("a", [1], GREEDY)
    assert len(tokens_of(drain(e)["a", 0])) == 12


def test_max_tokens_none_runs_to_the_end_of_the_context() -> None:
    tokens = solo([1] * 250, SamplingParams(temperature=0, max_tokens=None))
    assert len(tokens) == 6


@pytest.mark.parametrize("chunk", [7, 64, 512])
@pytest.mark.parametrize("residual", [0, 1])
def test_score_gives_every_position_once_amid_others(chunk: int, residual: int) -> None:
    kv = KVCacheConfig(dtype="int8", block_size=8, residual_blocks=residual)
    prompt = [t * 5 % VOCAB for t in range(100)]
    rows: dict[int, torch.Tensor] = {}
    e = engine(kv, max_num_batched_tokens=chunk)
    e.add_request("a", [1, 2, 3], GREEDY)
    e.score(prompt, lambda start, logits: rows.update(enumerate(logits, start)))
    assert sorted(rows) == list(range(100))
    assert tokens_of(drain(e)["a", 0]) == solo([1, 2, 3], GREEDY, max_num_seqs=2)
    alone = engine(kv)
    alone.add_request("x", prompt, SamplingParams(temperature=0, max_tokens=1))
    assert tokens_of(drain(alone)["x", 0]) == [int(rows[99].argmax())]


def test_p5_a_failing_score_callback_hurts_nobody() -> None:
    e = engine()
    e.add_request("a", [1, 2, 3], GREEDY)

    def fail(start: int, logits: torch.Tensor) -> None:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        e.score([1, 2], fail)
    assert tokens_of(drain(e)["a", 0]) == solo([1, 2, 3], GREEDY)


def test_options_that_disagree_are_refused() -> None:
    with pytest.raises(UsageError, match="max_model_len=999 is not within 1 … 256"):
        engine(max_model_len=999)
    with pytest.raises(UsageError, match="without chunked prefill"):
        engine(enable_chunked_prefill=False, max_num_batched_tokens=64)
    with pytest.raises(UsageError, match="max_num_seqs=0"):
        engine(max_num_seqs=0)
    with pytest.raises(UsageError, match="the executor keeps KV as int4"):
        Engine(FakeExecutor(KV), EngineConfig(kv=KVCacheConfig()))
