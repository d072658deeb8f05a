"""Is what the backend computes right? Asked before any figure is shown (X16)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from runtime_session import Setup, insist
from torch import Tensor

from qdeploy.kv.config import KVCacheConfig
from qdeploy.runtime.engine import Engine
from qdeploy.runtime.engine_config import EngineConfig
from qdeploy.runtime.executors import load_executor
from qdeploy.runtime.executors.base import Executor

TOKENS = 32
#: Nats a token; rounding of activations to int8 costs about a hundredth.
MOST_KL = 0.1


def check_model(setup: Setup) -> None:
    """Compare the backend's logits of a text with the reference backend's."""
    reference = load_executor(setup.folder, backend="reference", kv_config=KVCacheConfig())
    prompt = setup.text[:TOKENS]
    mine = _log_probabilities(setup.executor.with_kv(KVCacheConfig()), prompt)
    right = _log_probabilities(reference, prompt)
    found = float(np.mean(np.sum(np.exp(right) * (right - mine), axis=1)))
    insist(found < MOST_KL, f"KL {found:.2g} nats to the reference backend, not < {MOST_KL}")
    print(f"checked: KL {found:.2g} nats to the reference backend over {TOKENS} tokens", flush=True)


def _log_probabilities(executor: Executor, prompt: tuple[int, ...]) -> NDArray[np.float64]:
    """[tokens, vocabulary]"""
    rows: list[NDArray[np.float64]] = []

    def keep(_: int, logits: Tensor) -> None:
        rows.append(logits.double().log_softmax(-1).numpy())

    kv = executor.kv_config
    config = EngineConfig(kv=kv, max_model_len=TOKENS, max_num_seqs=1)
    Engine(executor, config).score(prompt, keep)
    return np.concatenate(rows)
