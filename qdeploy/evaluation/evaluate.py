"""Score an artifact against its reference through the runtime (DESIGN P1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from qdeploy.errors import UsageError
from qdeploy.evaluation.divergence import Divergence
from qdeploy.evaluation.gate import Gate
from qdeploy.evaluation.text import EvalText
from qdeploy.formats.manifest import EmbeddingsRecord, read_manifest
from qdeploy.kv.config import KVCacheConfig
from qdeploy.progress import Progress, Silent, Task
from qdeploy.runtime.engine import Engine
from qdeploy.runtime.engine_config import EngineConfig
from qdeploy.runtime.executors import load_executor
from qdeploy.runtime.executors.base import Executor

#: Prompt tokens per step: whole row tiles, and few enough that a step's logits stay small.
_CHUNK_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What one KV format cost on one text; embeddings: the policy of the model that ran."""

    kv_config: KVCacheConfig
    backend: str
    act: str
    reference: str
    text: EvalText
    metrics: dict[str, float]
    gate: Gate
    embeddings: EmbeddingsRecord | None = None

    @property
    def failures(self) -> list[str]:
        """Clauses of the gate that fail; empty when it passes."""
        return self.gate.failures(self.metrics)


def evaluate(
    model: Path,
    reference: Path,
    kv_configs: Sequence[KVCacheConfig],
    text: EvalText,
    gate: Gate,
    *,
    backend: str = "auto",
    act: str | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> list[Evaluation]:
    """Compare `model` under each KV policy with `reference` (its weights as stored, bf16 KV).

    Both run through engine, scheduler and paged KV cache, in the same windows; the reference
    runs once per window. Raises UsageError when the vocabularies differ.
    """
    progress = progress or Silent()
    base = load_executor(
        reference,
        backend="reference",
        kv_config=KVCacheConfig(),
        threads=threads,
        progress=progress,
    )
    executor = load_executor(
        model,
        backend=backend,
        act=act,
        kv_config=kv_configs[0],
        threads=threads,
        progress=progress,
    )
    _check_comparable(executor, base, text)
    reference_engine = _scoring_engine(base, base.kv_config, text.ctx_len)
    engines = [_scoring_engine(executor.with_kv(kv), kv, text.ctx_len) for kv in kv_configs]
    totals = [Divergence() for _ in engines]
    with progress.task("evaluate", text.num_tokens * (1 + len(engines))) as task:
        for window in text.windows:
            expected = _score(reference_engine, window, task)
            for engine, kv, total in zip(engines, kv_configs, totals, strict=True):
                _compare(engine, window, expected, total, task, f"kv {kv.dtype}")
    manifest = read_manifest(model)
    return [
        Evaluation(
            kv_config=kv,
            backend=executor.name,
            act=executor.act,
            reference=str(reference.name),
            text=text,
            metrics=total.metrics(),
            gate=gate,
            embeddings=manifest.embeddings if manifest is not None else None,
        )
        for kv, total in zip(kv_configs, totals, strict=True)
    ]


def _check_comparable(executor: Executor, base: Executor, text: EvalText) -> None:
    if executor.spec.vocab_size != base.spec.vocab_size:
        raise UsageError(
            f"the reference has {base.spec.vocab_size} tokens in its vocabulary, the model "
            f"{executor.spec.vocab_size}; give the model's own base with --reference"
        )
    limit = min(executor.spec.max_model_len, base.spec.max_model_len)
    if text.ctx_len > limit:
        raise UsageError(
            f"ctx-len {text.ctx_len} is over the model's {limit} positions; lower --ctx-len",
            param="ctx_len",
        )


def _scoring_engine(executor: Executor, kv: KVCacheConfig, ctx_len: int) -> Engine:
    config = EngineConfig(
        kv=kv, max_model_len=ctx_len, max_num_seqs=1, max_num_batched_tokens=_CHUNK_TOKENS
    )
    return Engine(executor, config, eos_token_ids=frozenset())


def _score(engine: Engine, window: Sequence[int], task: Task) -> Tensor:
    """The reference's raw logits [len(window), vocab], float32."""
    expected = torch.empty(len(window), engine.executor.spec.vocab_size)

    def keep(start: int, logits: Tensor) -> None:
        expected[start : start + len(logits)] = logits
        task.advance(len(logits), "reference")

    engine.score(window, keep)
    return expected


def _compare(
    engine: Engine,
    window: Sequence[int],
    expected: Tensor,
    total: Divergence,
    task: Task,
    note: str,
) -> None:
    """Chunk by chunk: a window of a 262k vocabulary is 2 GB, and one of them is enough."""
    targets = torch.tensor(window[1:])

    def compare(start: int, logits: Tensor) -> None:
        rows = slice(start, start + len(logits))
        total.add(expected[rows], logits, targets[rows])
        task.advance(len(logits), note)

    engine.score(window, compare)
