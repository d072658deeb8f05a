"""P2 and P5 on a real decoder: whatever the schedule, tokens equal the solo run bit for bit."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings

from backends import BACKENDS
from cpu.quantized_models import KINDS, quantized_checkpoint
from qdeploy.kv.config import KVCacheConfig
from qdeploy.runtime.engine import Engine
from qdeploy.runtime.engine_config import EngineConfig
from qdeploy.runtime.executors import load_executor
from qdeploy.runtime.executors.base import Executor
from qdeploy.runtime.sampling_params import SamplingParams
from runtime.storm import Arrival, Storm, assert_equals_solo, crowded, storms
from tiny_models import tiny_checkpoint

SECONDS = 12
MAX_MODEL_LEN = 72
VOCAB = 256
KV = KVCacheConfig(dtype="int4", block_size=16)


class Executors:
    """Makes engines on one tiny checkpoint and one backend: weights are loaded once for each
    number of threads, KV pools are an engine's own, so that two engines live side by side.
    """

    def __init__(self, folder: Path, backend: str) -> None:
        # Threads of torch are the process's; those of the cpu backend are an executor's own.
        counts = (1, 2, 3) if backend == "cpu" else (None,)
        self._loaded: Iterator[Executor] = itertools.cycle(
            [
                load_executor(folder, backend=backend, kv_config=KV, threads=threads)
                for threads in counts
            ]
        )

    def engine(self, config: EngineConfig) -> Engine:
        return Engine(next(self._loaded).with_kv(config.kv), config, frozenset({5}))


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=BACKENDS)
def executors(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Executors:
    """R28: quantized weights, whose kernels differ most between one row and many."""
    folder = quantized_checkpoint("llama", tmp_path_factory.mktemp("q"), KINDS["4-bit tables"])
    return Executors(folder, request.param)


@pytest.fixture(scope="module", params=BACKENDS)
def sliding(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Executors:
    """Gemma: layers with a window of 24 tokens, and one KV group each for them and the others."""
    return Executors(tiny_checkpoint("gemma3_text", tmp_path_factory.mktemp("g")), request.param)


def weather(executors: Executors, count: int, stop_at: float, number: int) -> None:
    """Ride up to `count` drawn storms, as many as begin before stop_at."""

    @settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))
    @seed(number)
    @given(storm=storms(VOCAB, block_size=16, max_model_len=MAX_MODEL_LEN, max_arrivals=4))
    def ride(storm: Storm) -> None:
        if time.monotonic() < stop_at:
            assert_equals_solo(storm, executors.engine)

    ride()


def test_x08_x09_every_request_equals_its_solo_run(executors: Executors) -> None:
    weather(executors, 100, time.monotonic() + SECONDS, 0)


def test_r25_sliding_windows_keep_p2(sliding: Executors) -> None:
    weather(sliding, 60, time.monotonic() + SECONDS / 2, 0)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("number", range(1, 11))
def test_many_schedules(executors: Executors, number: int) -> None:
    """10,000 on the cpu backend and 500 on the reference one, a tenth in each case."""
    count = 1000 if next(executors._loaded).name == "cpu" else 50
    weather(executors, count, float("inf"), number)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_schedules_with_windows(sliding: Executors) -> None:
    count = 1000 if next(sliding._loaded).name == "cpu" else 50
    weather(sliding, count, float("inf"), 1)


@pytest.mark.parametrize(
    ("dtype", "mode", "residual"),
    [
        ("int4", "recompute", 0),
        ("int4", "swap", 1),
        ("int8", "swap", 0),
        ("k8v4", "recompute", 1),
        ("fp8", "swap", 0),
        ("bf16", "recompute", 0),
        ("bf16", "swap", 0),
    ],
)
def test_a_storm_that_preempts(executors: Executors, dtype: str, mode: str, residual: int) -> None:
    kv = KVCacheConfig(dtype=dtype, block_size=16, residual_blocks=residual)
    storm = crowded(kv=kv, preemption=mode, extra_blocks=4 + 2 * residual)
    stats = assert_equals_solo(storm, executors.engine)
    assert stats.num_preemptions_total > 0
    assert stats.num_swaps_total == (stats.num_preemptions_total if mode == "swap" else 0)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_r25_a_storm_with_windows_that_preempts(sliding: Executors, mode: str) -> None:
    stats = assert_equals_solo(crowded(preemption=mode), sliding.engine)
    assert stats.num_preemptions_total > 0


def together(prompts: list[tuple[int, ...]], **changes: int) -> Storm:
    arrivals = tuple(
        Arrival(at=0, abort=-1, prompt=p, params=SamplingParams(temperature=0, max_tokens=8))
        for p in prompts
    )
    return crowded(arrivals=arrivals, extra_blocks=60, max_num_seqs=8, **changes)


def test_r08_two_identical_prompts_in_one_batch(executors: Executors) -> None:
    prompt = tuple(7 * t % VOCAB for t in range(300))
    storm = together([prompt, prompt], max_model_len=320, max_num_batched_tokens=700)
    assert assert_equals_solo(storm, executors.engine).prefix_cache_hits_total == 288


def test_r25_another_ending_after_a_prefix_longer_than_the_window(sliding: Executors) -> None:
    shared = tuple(5 * t % VOCAB for t in range(70))
    storm = together([(*shared, 1, 2, 3), (*shared, 9, 8)], max_model_len=100)
    later = replace(storm, arrivals=(storm.arrivals[0], replace(storm.arrivals[1], at=20)))
    for both in (storm, later):
        assert assert_equals_solo(both, sliding.engine).prefix_cache_hits_total == 64


def test_r07_four_samples_of_a_prompt_one_token_past_a_block(executors: Executors) -> None:
    params = SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=20)
    request = Arrival(at=0, abort=-1, prompt=tuple(range(17)), params=params)
    for dtype in ("int4", "bf16"):
        kv = KVCacheConfig(dtype=dtype, block_size=16)
        storm = crowded(kv=kv, arrivals=(request,), extra_blocks=20, max_num_seqs=4)
        assert_equals_solo(storm, executors.engine)


def test_x07_an_answer_in_a_full_cache_is_that_in_an_empty_one(executors: Executors) -> None:
    """Prefixes of earlier requests fill more than 80 % of the pools; then the first one again."""
    engine = executors.engine(EngineConfig(kv=KV, max_model_len=MAX_MODEL_LEN, num_kv_blocks=40))
    params = SamplingParams(temperature=0, max_tokens=8)

    def answer(name: str, prompt: list[int]) -> list[int]:
        engine.add_request(name, prompt, params)
        outputs = []
        while engine.has_unfinished:
            outputs += engine.step()
        return [token for output in outputs for token in output.token_ids]

    first = answer("first", list(range(40)))
    for i in range(1, 14):
        answer(str(i), [i] * 60)
    stats = engine.stats()
    cached = stats.num_open_blocks_cached + stats.num_sealed_blocks_cached
    assert cached > 0.8 * (stats.num_open_blocks + stats.num_sealed_blocks)
    assert answer("again", list(range(40))) == first
    assert answer("once more", list(range(40))) == first


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("arch", ["mistral", "qwen2", "qwen3"])
def test_every_architecture_keeps_p2(arch: str, backend: str, tmp_path: Path) -> None:
    executors = Executors(tiny_checkpoint(arch, tmp_path), backend)
    storm = Storm(
        kv=KV,
        arrivals=tuple(
            Arrival(at=2 * i, abort=-1, prompt=tuple(range(1, 20 + 9 * i)), params=SamplingParams())
            for i in range(3)
        ),
        extra_blocks=1,
        max_num_seqs=3,
        max_num_batched_tokens=7,
        chunked=True,
        max_model_len=MAX_MODEL_LEN,
    )
    assert_equals_solo(storm, executors.engine)


def scores(engine: Callable[[EngineConfig], Engine], chunk: int, dtype: str) -> torch.Tensor:
    prompt = [7 * t % VOCAB for t in range(MAX_MODEL_LEN)]
    kv = KVCacheConfig(dtype=dtype, block_size=16)
    config = EngineConfig(kv=kv, max_model_len=MAX_MODEL_LEN, max_num_batched_tokens=chunk)
    rows: list[torch.Tensor] = []
    scoring = engine(config)
    for _ in range(2):  # R05: what the first run leaves in the cache changes nothing
        rows.clear()
        scoring.score(prompt, lambda _, logits: rows.append(logits.clone()))
    return torch.cat(rows)


@pytest.mark.parametrize("dtype", ["int4", "bf16"])
def test_scores_don_t_depend_on_chunks_or_threads(executors: Executors, dtype: str) -> None:
    found = []
    for chunk, threads in ((1, 1), (19, 2), (MAX_MODEL_LEN, 1)):
        torch.set_num_threads(threads)
        found.append(scores(executors.engine, chunk, dtype))
    torch.set_num_threads(1)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
