"""P2 with speculation on real decoders: whatever is drafted, tokens equal a run without drafts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from backends import BACKENDS
from cpu.quantized_models import KINDS, quantized_checkpoint
from qdeploy.kv.config import KVCacheConfig
from qdeploy.runtime.engine import Engine
from qdeploy.runtime.engine_config import EngineConfig
from qdeploy.runtime.executors import load_executor
from qdeploy.runtime.executors.base import Executor
from qdeploy.runtime.sampling_params import SamplingParams
from qdeploy.runtime.speculation.base import Drafter
from qdeploy.runtime.speculation.loading import make_model_drafter
from qdeploy.runtime.speculation.ngram import NgramDrafter
from runtime.storm import Arrival, Storm, crowded, storms
from speculation.stress import (
    Answers,
    StressDrafter,
    assert_drafts_change_nothing,
    every_draft,
)

__all__ = ["every_draft"]
MAX_MODEL_LEN = 72
VOCAB = 256
METHODS = ("stress", "ngram", "twin", "cheap KV")


class Models:
    """Engines on one tiny checkpoint and one backend."""

    def __init__(self, folder: Path, backend: str) -> None:
        self.folder, self.backend = folder, backend
        self.threads = itertools.cycle((1, 2, 3))

    def executor(self, kv: KVCacheConfig) -> Executor:
        threads = next(self.threads) if self.backend == "cpu" else None
        return load_executor(self.folder, backend=self.backend, kv_config=kv, threads=threads)

    def engine(self, config: EngineConfig, drafter: Drafter | None) -> Engine:
        return Engine(self.executor(config.kv), config, frozenset({5}), drafter=drafter)

    def drafter(self, method: str, config: EngineConfig, answers: Answers) -> Drafter:
        if method == "stress":
            return StressDrafter(answers, VOCAB, 7)
        if method == "ngram":
            return NgramDrafter(1, 4)
        kv = config.kv if method == "twin" else replace(config.kv, dtype="int4", residual_blocks=0)
        target = self.executor(config.kv)
        return make_model_drafter(target.with_kv(kv), config, target, frozenset({5}))


@pytest.fixture(scope="module", params=BACKENDS)
def models(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Models]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    # R28: quantized weights, whose kernels differ most between one row and many.
    folder = quantized_checkpoint("llama", tmp_path_factory.mktemp("q"), KINDS["4-bit tables"])
    yield Models(folder, request.param)
    torch.set_num_threads(threads)


def draft_in_storms(models: Models, count: int, number: int) -> None:
    """Ride `count` drawn storms, each with a drawn drafter."""

    @settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))
    @seed(number)
    @given(
        storm=storms(VOCAB, block_size=16, max_model_len=MAX_MODEL_LEN, max_arrivals=3),
        method=st.sampled_from(METHODS),
        drafts=st.sampled_from([1, 4, 11]),
    )
    def ride(storm: Storm, method: str, drafts: int) -> None:
        def drafter(config: EngineConfig, answers: Answers) -> Drafter:
            return models.drafter(method, config, answers)

        assert_drafts_change_nothing(storm, models.engine, drafter, drafts)

    ride()


@pytest.mark.usefixtures("every_draft")
def test_r28_drafts_change_nothing(models: Models) -> None:
    draft_in_storms(models, 60, 0)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("every_draft")
def test_many_schedules_with_drafts(models: Models) -> None:
    """3,000 on the cpu backend, 150 on the reference one."""
    draft_in_storms(models, 3000 if models.backend == "cpu" else 150, 1)


@pytest.mark.usefixtures("every_draft")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", ["int4", "k8v4", "bf16"])
def test_a_full_cache_with_drafts(models: Models, dtype: str, method: str) -> None:
    storm = crowded(
        kv=KVCacheConfig(dtype=dtype, block_size=16, residual_blocks=1),
        arrivals=tuple(
            Arrival(
                at=i,
                abort=-1,
                prompt=tuple(range(i, i + 37)),
                params=SamplingParams(max_tokens=24, temperature=0.9, seed=i, ignore_eos=True),
            )
            for i in range(3)
        ),
    )
    assert_drafts_change_nothing(storm, models.engine, lambda c, a: models.drafter(method, c, a), 5)


@pytest.mark.usefixtures("every_draft")
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_r12_a_twin_is_accepted_throughout(models: Models, temperature: float) -> None:
    storm = Storm(
        kv=KVCacheConfig(dtype="int8", block_size=16),
        arrivals=(
            Arrival(
                at=0,
                abort=-1,
                prompt=tuple(range(7)),
                params=SamplingParams(
                    max_tokens=240, temperature=temperature, seed=1, ignore_eos=True
                ),
            ),
        ),
        extra_blocks=40,
        max_num_seqs=2,
        max_num_batched_tokens=64,
        chunked=True,
        max_model_len=256,
    )
    engine = assert_drafts_change_nothing(
        storm, models.engine, lambda c, a: models.drafter("twin", c, a), 5
    )
    stats = engine.stats().speculation
    assert stats.num_accepted_tokens == stats.num_draft_tokens >= 190
