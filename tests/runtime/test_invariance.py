"""P2 and P5 on a real decoder: whatever the schedule, tokens equal the solo run bit for bit."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings

from backends import BACKENDS
from cpu.quantized_models import KINDS, quantized_checkpoint
from qdeploy.kv.config import KVCacheConfig
from qdeploy.runtime.engine import Engine, EngineConfig
from qdeploy.runtime.executors import load_executor
from qdeploy.runtime.sampling_params import SamplingParams
from runtime.storm import Arrival, Storm, assert_equals_solo, storms
from tiny_models import tiny_checkpoint

SECONDS = 40
MAX_MODEL_LEN = 72
VOCAB = 256


class Executors:
    """Makes engines on one tiny checkpoint and one backend."""

    def __init__(self, folder: Path, backend: str) -> None:
        self.folder, self.backend = folder, backend
        self.threads = itertools.cycle((1, 2, 3))

    def engine(self, config: EngineConfig) -> Engine:
        """A fresh engine on an executor of its own, so that two live side by side."""
        # Threads of torch are the process's; those of the cpu backend are an executor's own.
        threads = next(self.threads) if self.backend == "cpu" else None
        executor = load_executor(
            self.folder, backend=self.backend, kv_config=config.kv, threads=threads
        )
        return Engine(executor, config, frozenset({5}))


@pytest.fixture(scope="module", params=BACKENDS)
def executors(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Executors]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    # R28: quantized weights, whose kernels differ most between one row and many.
    folder = quantized_checkpoint("llama", tmp_path_factory.mktemp("q"), KINDS["4-bit tables"])
    yield Executors(folder, request.param)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def deadline(executors: Executors) -> float:
    """The property test stops drawing after this time; it has many examples by then."""
    return time.monotonic() + SECONDS


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(storm=storms(VOCAB, block_size=16, max_model_len=MAX_MODEL_LEN, max_arrivals=4))
def test_x08_x09_every_request_equals_its_solo_run(
    executors: Executors, deadline: float, storm: Storm
) -> None:
    assume(time.monotonic() < deadline)
    assert_equals_solo(storm, executors.engine)


@pytest.mark.parametrize("dtype", ["int4", "int8", "k8v4", "fp8", "bf16"])
def test_a_storm_that_preempts(executors: Executors, dtype: str) -> None:
    storm = Storm(
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
        extra_blocks=4,
        max_num_seqs=3,
        max_num_batched_tokens=24,
        chunked=True,
        max_model_len=MAX_MODEL_LEN,
    )
    compared, preemptions = assert_equals_solo(storm, executors.engine)
    assert compared == 3
    assert preemptions > 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("arch", ["mistral", "qwen2", "qwen3", "gemma3_text"])
def test_every_architecture_keeps_p2(arch: str, backend: str, tmp_path: Path) -> None:
    executors = Executors(tiny_checkpoint(arch, tmp_path), backend)
    storm = Storm(
        kv=KVCacheConfig(dtype="int4", block_size=16),
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


@pytest.mark.parametrize("dtype", ["int4", "bf16"])
def test_scores_don_t_depend_on_chunks_or_threads(executors: Executors, dtype: str) -> None:
    kv = KVCacheConfig(dtype=dtype, block_size=16)
    prompt = [7 * t % VOCAB for t in range(MAX_MODEL_LEN)]
    found = []
    for chunk, threads in ((1, 1), (19, 2), (MAX_MODEL_LEN, 1)):
        torch.set_num_threads(threads)
        rows: list[torch.Tensor] = []
        config = EngineConfig(kv=kv, max_model_len=MAX_MODEL_LEN, max_num_batched_tokens=chunk)
        executors.engine(config).score(prompt, lambda _, logits, rows=rows: rows.append(logits))
        found.append(torch.cat(rows))
    torch.set_num_threads(1)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
