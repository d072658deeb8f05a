"""Random schedules: what arrives when, how it is batched, what is aborted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from qdeploy.kv.config import KVCacheConfig
from qdeploy.kv.groups import KVGroup
from qdeploy.runtime.engine import Engine, EngineConfig
from qdeploy.runtime.sampling_params import SamplingParams

Outcome = tuple[tuple[int, ...], str]


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A request that comes before step `at`, and is aborted after step `abort` (−1: never)."""

    at: int
    abort: int
    prompt: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True, kw_only=True)
class Storm:
    """One schedule; extra_blocks is what the cache has beyond the smallest legal size."""

    kv: KVCacheConfig
    arrivals: tuple[Arrival, ...]
    extra_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    chunked: bool
    max_model_len: int


def storms(
    vocab: int, *, block_size: int, max_model_len: int, max_arrivals: int
) -> st.SearchStrategy[Storm]:
    kv = st.builds(
        KVCacheConfig,
        dtype=st.sampled_from(["int4", "int8", "k8v4", "fp8", "bf16"]),
        block_size=st.just(block_size),
        sink_blocks=st.integers(0, 1),
        residual_blocks=st.integers(0, 1),
    )
    params = st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.8, 1.5]),
        n=st.sampled_from([1, 1, 2]),
        seed=st.sampled_from([None, 3]),
        max_tokens=st.integers(1, max_model_len // 3),
        repetition_penalty=st.sampled_from([1.0, 1.0, 1.2]),
        top_p=st.sampled_from([1.0, 0.9]),
    )
    arrival = st.builds(
        Arrival,
        at=st.integers(0, 12),
        abort=st.sampled_from([-1, -1, -1, 5, 15]),
        prompt=st.lists(
            st.integers(0, vocab - 1), min_size=1, max_size=max_model_len * 2 // 3 - 1
        ).map(tuple),
        params=params,
    )
    return st.builds(
        Storm,
        kv=kv,
        arrivals=st.lists(arrival, min_size=2, max_size=max_arrivals).map(tuple),
        extra_blocks=st.sampled_from([0, 0, 1, 2, 4, 8]),
        max_num_seqs=st.integers(2, 5),
        max_num_batched_tokens=st.integers(1, max_model_len),
        chunked=st.booleans(),
        max_model_len=st.just(max_model_len),
    )


def ride(storm: Storm, engine: Engine) -> dict[tuple[str, int], Outcome]:
    """Run a storm; (request id, sample) → (tokens, finish_reason). Checks for leaks."""
    tokens: dict[tuple[str, int], tuple[int, ...]] = {}
    found: dict[tuple[str, int], Outcome] = {}
    step, left = 0, dict(enumerate(storm.arrivals))
    while left or engine.has_unfinished:
        for i in [i for i, a in left.items() if a.at <= step]:
            arrival = left.pop(i)
            engine.add_request(f"r{i}", arrival.prompt, arrival.params)
        for i, arrival in enumerate(storm.arrivals):
            if arrival.abort == step:
                engine.abort(f"r{i}")
        for output in engine.step():
            key = (output.request_id, output.index)
            tokens[key] = tokens.get(key, ()) + output.token_ids
            if output.finish_reason is not None:
                assert key not in found, "finished twice"
                found[key] = (tokens[key], output.finish_reason)
        engine.scheduler.check_integrity()
        step += 1
        assert step < 5000, "no progress"
    stats = engine.stats()
    assert stats.num_open_blocks_used == stats.num_sealed_blocks_used == 0, "blocks leaked"
    assert sum(stats.finished.values()) == len(found) == sum(a.params.n for a in storm.arrivals)
    return found


def storm_config(storm: Storm, groups: Sequence[KVGroup]) -> EngineConfig:
    smallest = sum(sum(group.blocks_for_tokens(storm.max_model_len)) for group in groups)
    budget = storm.max_num_batched_tokens if storm.chunked else storm.max_model_len
    return EngineConfig(
        kv=storm.kv,
        max_model_len=storm.max_model_len,
        max_num_seqs=storm.max_num_seqs,
        max_num_batched_tokens=budget,
        enable_chunked_prefill=storm.chunked,
        num_kv_blocks=smallest + storm.extra_blocks,
    )


def assert_equals_solo(
    storm: Storm, make_engine: Callable[[EngineConfig], Engine]
) -> tuple[int, int]:
    """Every request's tokens are those of its solo run. Returns (compared, preemptions)."""
    roomy = EngineConfig(
        kv=storm.kv, max_model_len=storm.max_model_len, max_num_batched_tokens=storm.max_model_len
    )
    solo = make_engine(roomy)
    engine = make_engine(storm_config(storm, solo.executor.kv_groups))
    outcomes = ride(storm, engine)
    for i, arrival in enumerate(storm.arrivals):
        # Same request id, since it seeds requests without a seed.
        expected = solo_run(solo, f"r{i}", arrival)
        for index, reference in expected.items():
            tokens, reason = outcomes[f"r{i}", index]
            if reason == "abort":
                assert tokens == reference[0][: len(tokens)]
            else:
                assert (tokens, reason) == reference
    return len(outcomes), engine.stats().num_preemptions_total


def solo_run(engine: Engine, name: str, arrival: Arrival) -> dict[int, Outcome]:
    engine.add_request(name, arrival.prompt, arrival.params)
    tokens: dict[int, tuple[int, ...]] = {}
    reasons: dict[int, str] = {}
    while engine.has_unfinished:
        for output in engine.step():
            tokens[output.index] = tokens.get(output.index, ()) + output.token_ids
            reasons[output.index] = output.finish_reason or ""
    return {index: (tokens[index], reasons[index]) for index in tokens}
