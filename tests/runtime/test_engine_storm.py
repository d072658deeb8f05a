"""Random schedules on the fake executor, whose tokens depend on every block read."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings

from qdeploy.kv.config import KVCacheConfig
from qdeploy.runtime.engine import Engine, EngineConfig
from qdeploy.runtime.sampling_params import SamplingParams
from runtime.fake_executor import VOCAB, FakeExecutor
from runtime.storm import Arrival, Storm, assert_equals_solo, storms


def make_engine(config: EngineConfig) -> Engine:
    return Engine(FakeExecutor(config.kv), config, frozenset({7}))


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(storm=storms(VOCAB, block_size=8, max_model_len=60, max_arrivals=6))
def test_every_request_equals_its_solo_run(storm: Storm) -> None:
    assert_equals_solo(storm, make_engine)


def test_a_storm_in_the_smallest_cache_preempts() -> None:
    arrivals = tuple(
        Arrival(at=i, abort=-1, prompt=(i,) * 30, params=SamplingParams(max_tokens=20, seed=i))
        for i in range(4)
    )
    for dtype in ("int4", "bf16"):
        storm = Storm(
            kv=KVCacheConfig(dtype=dtype, block_size=8),
            arrivals=arrivals,
            extra_blocks=2,
            max_num_seqs=4,
            max_num_batched_tokens=16,
            chunked=True,
            max_model_len=60,
        )
        compared, preemptions = assert_equals_solo(storm, make_engine)
        assert compared == 4
        assert preemptions > 0
