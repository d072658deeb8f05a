"""A real model: what int8 activations cost, and that exact ones cost nothing."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cpu.quantized_models import WeightKind, rounded_checkpoint
from qdeploy.kv.config import KV_DTYPES, KVCacheConfig
from qdeploy.runtime.executors import load_executor
from qdeploy.runtime.executors.base import Executor
from qdeploy.runtime.tokenizer import Tokenizer
from tables import run_chunks

TEXT = """The Eiffel Tower is a wrought-iron lattice tower on the Champ de Mars in Paris, France. It
is named after the engineer Gustave Eiffel, whose company designed and built the tower from 1887 to
1889. def fibonacci(n): return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)
"""
W4 = WeightKind(format="gptq", group=64, symmetric=True, embeddings=8)


@pytest.fixture(scope="module")
def artifact(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rounded_checkpoint(smollm2_folder, tmp_path_factory.mktemp("w4") / "out", W4)


@cache
def tokens(folder: Path) -> list[int]:
    return Tokenizer.load(folder).encode(TEXT * 3)[:200]


def log_probabilities(executor: Executor, ids: list[int]) -> Tensor:
    return run_chunks(executor, ids, [len(ids)]).double().log_softmax(-1)


def divergence(p: Tensor, q: Tensor) -> float:
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.model
def test_int8_activations_cost_less_than_a_hundredth_of_a_nat(artifact: Path) -> None:
    ids, kv = tokens(artifact), KVCacheConfig()
    exact = log_probabilities(load_executor(artifact, backend="reference", kv_config=kv), ids)
    for act, limit in (("int8", 0.01), ("fp32", 1e-9)):
        executor = load_executor(artifact, backend="cpu", act=act, kv_config=kv)
        assert divergence(exact, log_probabilities(executor, ids)) < limit


@pytest.mark.model
def test_every_kv_format_keeps_p2_on_a_real_model(artifact: Path) -> None:
    executor = load_executor(artifact, backend="cpu", kv_config=KVCacheConfig())
    ids = tokens(artifact)
    for dtype in KV_DTYPES:
        mine = executor.with_kv(KVCacheConfig(dtype=dtype))
        whole = run_chunks(mine, ids, [len(ids)])
        assert torch.equal(run_chunks(mine, ids, [97, 98, 163, len(ids)]), whole)
