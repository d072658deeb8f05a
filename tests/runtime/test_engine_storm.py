"""Random schedules on the fake executor, whose tokens depend on every block read."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qdeploy.kv.config import KVCacheConfig, LayerPolicy
from qdeploy.runtime.engine import Engine
from qdeploy.runtime.engine_config import EngineConfig
from qdeploy.runtime.preemption import PREEMPTION_MODES
from qdeploy.runtime.sampling_params import SamplingParams
from runtime.fake_executor import VOCAB, FakeExecutor
from runtime.storm import Arrival, Storm, assert_equals_solo, crowded, storms, twice

STORMS = storms(VOCAB, block_size=8, max_model_len=60, max_arrivals=6, may_fail=True)
#: One KV group each: full attention, Gemma-like, all layers sliding, windows of odd lengths.
WINDOWS = st.sampled_from([(0,), (0,), (12, 0), (16,), (7, 25)])
#: Another policy for the second group.
POLICY = st.sampled_from(
    [(), (LayerPolicy(layer=1, dtype="int8", sink_blocks=0, residual_blocks=1),)]
)
LONG = SamplingParams(n=8, max_tokens=35, ignore_eos=True)


def ride(storm: Storm, windows: tuple[int, ...] = (0,)) -> Engine:
    engines = []

    def make_engine(config: EngineConfig) -> Engine:
        executor = FakeExecutor(config.kv, windows=windows)
        engines.append(Engine(executor, config, frozenset({7})))
        return engines[-1]

    assert_equals_solo(storm, make_engine)
    return engines[-1]


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(storm=STORMS, windows=WINDOWS, policy=POLICY, again=st.booleans())
def test_every_request_equals_its_solo_run(
    storm: Storm, windows: tuple[int, ...], policy: tuple[LayerPolicy, ...], again: bool
) -> None:
    if len(windows) > 1 and policy:
        storm = replace(storm, kv=replace(storm.kv, layers=policy))
    ride(twice(storm) if again else storm, windows)


def packed(dtype: str, **changes: object) -> Storm:
    """Four long requests in a cache that holds little more than one."""
    storm = crowded(
        kv=KVCacheConfig(dtype=dtype, block_size=8),
        arrivals=tuple(
            Arrival(
                at=i,
                abort=-1,
                prompt=(i,) * 9,
                params=SamplingParams(max_tokens=50, seed=i, ignore_eos=True),
            )
            for i in range(4)
        ),
        extra_blocks=3,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=60,
    )
    return replace(storm, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["int4", "bf16"])
@pytest.mark.parametrize("mode", PREEMPTION_MODES)
def test_a_storm_in_the_smallest_cache_preempts(dtype: str, mode: str) -> None:
    stats = ride(packed(dtype, preemption=mode, extra_blocks=6)).stats()
    assert stats.num_preemptions_total > 0
    if mode != "auto":
        assert stats.num_swaps_total == (stats.num_preemptions_total if mode == "swap" else 0)


def test_r09_when_swap_space_runs_out_requests_are_recomputed() -> None:
    """A pool for one, n=8, and room on the host for a few blocks only."""
    request = Arrival(at=0, abort=-1, prompt=(1,) * 20, params=LONG)
    storm = packed("int4", arrivals=(request, request), extra_blocks=12, max_num_seqs=8)
    stats = ride(replace(storm, preemption="swap", swap_space_bytes=250)).stats()
    assert 0 < stats.num_swaps_total < stats.num_preemptions_total


def test_r09_bytes_that_cannot_be_moved_are_computed_anew() -> None:
    class Clumsy(FakeExecutor):
        """Every other move fails."""

        moves = 0

        def drop(self) -> None:
            self.moves += 1
            if self.moves % 2:
                raise MemoryError

        def read_blocks(self, ids):  # type: ignore[no-untyped-def]
            self.drop()
            return super().read_blocks(ids)

        def write_blocks(self, ids, data):  # type: ignore[no-untyped-def]
            self.drop()
            super().write_blocks(ids, data)

    executors: list[Clumsy] = []

    def make_engine(config: EngineConfig) -> Engine:
        executors.append(Clumsy(config.kv))
        return Engine(executors[-1], config, frozenset({7}))

    storm = packed("int4", preemption="swap", prefix_caching=False, extra_blocks=6)
    assert assert_equals_solo(storm, make_engine).num_swaps_total > 1
    assert executors[-1].moves > 1


def test_r10_r17_eight_long_requests_a_tiny_pool_and_failing_steps() -> None:
    arrivals = tuple(
        Arrival(at=0, abort=-1, prompt=(i,) * 20, params=replace(LONG, n=1, seed=i))
        for i in range(8)
    )
    for mode in ("swap", "recompute"):
        storm = packed("int4", arrivals=arrivals, preemption=mode, max_num_seqs=8, extra_blocks=8)
        stats = ride(replace(storm, fails=(9, 60))).stats()
        assert stats.num_preemptions_total > 0
        assert 0 < stats.finished["error"] < 8


def test_r15_one_prompt_twenty_times() -> None:
    prompt = tuple(t % 5 for t in range(37))
    request = Arrival(at=0, abort=-1, prompt=prompt, params=SamplingParams(temperature=0))
    storm = packed("int4", arrivals=tuple(replace(request, at=2 * i) for i in range(20)))
    stats = ride(replace(storm, extra_blocks=20)).stats()
    assert stats.prefix_cache_hits_total == 19 * 32
    assert stats.prefix_cache_queries_total == 20 * 37
