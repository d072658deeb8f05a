"""Random schedules: what arrives when, how it is batched, shared and preempted, what is aborted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from qdeploy.kv.config import KVCacheConfig
from qdeploy.kv.groups import KVGroup
from qdeploy.runtime.engine import Engine
from qdeploy.runtime.engine_config import EngineConfig
from qdeploy.runtime.outputs import EngineStats
from qdeploy.runtime.preemption import PREEMPTION_MODES
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
    """One schedule; extra_blocks is what the cache has beyond the smallest legal size.

    fails: steps in which the executor raises, where it can be told to.
    """

    kv: KVCacheConfig
    arrivals: tuple[Arrival, ...]
    extra_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    chunked: bool
    max_model_len: int
    prefix_caching: bool = True
    preemption: str = "auto"
    swap_space_bytes: int = 1 << 30
    fails: tuple[int, ...] = ()


def crowded(**changes: object) -> Storm:
    """Three long sampled requests in a cache that holds little more than one of them."""
    storm = Storm(
        kv=KVCacheConfig(dtype="int4", block_size=16),
        arrivals=tuple(
            Arrival(
                at=i,
                abort=-1,
                prompt=tuple(range(i, i + 15)),
                params=SamplingParams(max_tokens=50, temperature=0.9, seed=i, ignore_eos=True),
            )
            for i in range(3)
        ),
        extra_blocks=4,
        max_num_seqs=3,
        max_num_batched_tokens=24,
        chunked=True,
        max_model_len=72,
    )
    return replace(storm, **changes)  # type: ignore[arg-type]


def kv_configs(block_size: int) -> st.SearchStrategy[KVCacheConfig]:
    return st.builds(
        KVCacheConfig,
        dtype=st.sampled_from(["int4", "int8", "k8v4", "fp8", "bf16"]),
        block_size=st.just(block_size),
        sink_blocks=st.integers(0, 2),
        residual_blocks=st.sampled_from([0, 0, 1, 2]),
    )


def params(max_model_len: int) -> st.SearchStrategy[SamplingParams]:
    return st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.8, 1.5]),
        n=st.sampled_from([1, 1, 2, 3]),
        seed=st.sampled_from([None, 3]),
        max_tokens=st.integers(1, max_model_len // 3),
        repetition_penalty=st.sampled_from([1.0, 1.0, 1.2]),
        top_p=st.sampled_from([1.0, 0.9]),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        cache_salt=st.sampled_from([None, None, None, "x"]),
    )


@st.composite
def prompts(draw: st.DrawFn, vocab: int, longest: int) -> tuple[int, ...]:
    """One of two texts up to some point, then something of its own, or nothing."""
    shared = draw(st.integers(0, longest))
    stride = draw(st.sampled_from([3, 7]))
    own = draw(st.lists(st.integers(0, vocab - 1), max_size=longest - shared))
    start = tuple(stride * t % vocab for t in range(shared))
    return (start + tuple(own)) or (1,)


def storms(
    vocab: int, *, block_size: int, max_model_len: int, max_arrivals: int, may_fail: bool = False
) -> st.SearchStrategy[Storm]:
    arrival = st.builds(
        Arrival,
        at=st.integers(0, 12),
        abort=st.sampled_from([-1, -1, -1, 5, 15]),
        prompt=prompts(vocab, max_model_len * 2 // 3 - 1),
        params=params(max_model_len),
    )
    steps = st.lists(st.integers(0, 40), max_size=2).map(tuple)
    return st.builds(
        Storm,
        kv=kv_configs(block_size),
        arrivals=st.lists(arrival, min_size=2, max_size=max_arrivals).map(tuple),
        extra_blocks=st.sampled_from([0, 0, 1, 2, 4, 8, 30]),
        max_num_seqs=st.integers(3, 6),
        max_num_batched_tokens=st.integers(1, max_model_len),
        chunked=st.booleans(),
        max_model_len=st.just(max_model_len),
        prefix_caching=st.sampled_from([True, True, True, False]),
        preemption=st.sampled_from(PREEMPTION_MODES),
        swap_space_bytes=st.sampled_from([1, 40_000, 1 << 30]),
        fails=st.one_of(st.just(()), steps) if may_fail else st.just(()),
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
        if step in storm.fails:
            engine.executor.fail_next = MemoryError()  # type: ignore[attr-defined]
        for output in engine.step():
            key = (output.request_id, output.index)
            tokens[key] = tokens.get(key, ()) + output.token_ids
            if output.finish_reason is not None:
                assert key not in found, "finished twice"
                found[key] = (tokens[key], output.finish_reason)
        engine.scheduler.check_integrity()
        step += 1
        assert step < 5000, "no progress"
    check_nothing_leaked(engine.stats())
    finished = sum(engine.stats().finished.values())
    assert finished == len(found) == sum(a.params.n for a in storm.arrivals)
    return found


def check_nothing_leaked(stats: EngineStats) -> None:
    """All blocks are free or cached, nothing is on the host, nobody waits, counters agree."""
    assert stats.num_open_blocks_used == stats.num_sealed_blocks_used == 0, "blocks leaked"
    assert stats.swap_space_used_bytes == 0, "swap space leaked"
    assert stats.num_requests_running == stats.num_requests_waiting == 0
    assert stats.num_swaps_total <= stats.num_preemptions_total
    assert stats.prefix_cache_hits_total <= stats.prefix_cache_queries_total


def storm_config(storm: Storm, groups: Sequence[KVGroup]) -> EngineConfig:
    smallest = sum(sum(group.blocks_for_tokens(storm.max_model_len)) for group in groups)
    budget = storm.max_num_batched_tokens if storm.chunked else storm.max_model_len
    return EngineConfig(
        kv=storm.kv,
        max_model_len=storm.max_model_len,
        max_num_seqs=storm.max_num_seqs,
        max_num_batched_tokens=budget,
        enable_chunked_prefill=storm.chunked,
        enable_prefix_caching=storm.prefix_caching,
        preemption=storm.preemption,
        swap_space_bytes=storm.swap_space_bytes,
        num_kv_blocks=smallest + storm.extra_blocks,
    )


def assert_equals_solo(storm: Storm, make_engine: Callable[[EngineConfig], Engine]) -> EngineStats:
    """Every request's tokens are those of its solo run, on an engine that shares nothing.

    Returns the storm's counters.
    """
    roomy = EngineConfig(
        kv=storm.kv,
        max_model_len=storm.max_model_len,
        max_num_batched_tokens=storm.max_model_len,
        enable_prefix_caching=False,
    )
    solo = make_engine(roomy)
    engine = make_engine(storm_config(storm, solo.executor.kv_groups))
    outcomes = ride(storm, engine)
    for i, arrival in enumerate(storm.arrivals):
        # Same request id, since it seeds requests without a seed.
        for index, reference in solo_run(solo, f"r{i}", arrival).items():
            tokens, reason = outcomes[f"r{i}", index]
            if reason in ("abort", "error"):
                assert tokens == reference[0][: len(tokens)]
            else:
                assert (tokens, reason) == reference
    return engine.stats()


def solo_run(engine: Engine, name: str, arrival: Arrival) -> dict[int, Outcome]:
    engine.add_request(name, arrival.prompt, arrival.params)
    tokens: dict[int, tuple[int, ...]] = {}
    reasons: dict[int, str] = {}
    while engine.has_unfinished:
        for output in engine.step():
            tokens[output.index] = tokens.get(output.index, ()) + output.token_ids
            reasons[output.index] = output.finish_reason or ""
    return {index: (tokens[index], reasons[index]) for index in tokens}


def twice(storm: Storm) -> Storm:
    """The same requests again, later: what they left in the cache is found."""
    later = tuple(replace(a, at=a.at + 30) for a in storm.arrivals)
    return replace(storm, arrivals=storm.arrivals + later)
