"""Evaluation as the commands use it: resolve, score, record, judge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from qdeploy.errors import FormatError, GateError, UsageError
from qdeploy.evaluation.evaluate import Evaluation, evaluate
from qdeploy.evaluation.gate import DEFAULT_GATE, Gate, parse_gate
from qdeploy.evaluation.records import write_records
from qdeploy.evaluation.text import default_text, load_text
from qdeploy.formats.hf import open_folder
from qdeploy.formats.manifest import Manifest, read_manifest
from qdeploy.formats.sources import resolve_model
from qdeploy.kv.config import KVCacheConfig
from qdeploy.models.spec import spec_from_config
from qdeploy.progress import Progress
from qdeploy.runtime.tokenizer import Tokenizer

#: Windows of the quick suite; the full one takes the whole text.
QUICK_WINDOWS = 4
#: Context of the record that `quantize` writes; `eval` defaults to 2,048.
QUICK_CTX_LEN = 1024


def reference_of(artifact: Path, manifest: Manifest | None, given: str | None) -> str:
    """The reference model's name: as given, or the artifact's base model."""
    if given is not None:
        return given
    if manifest is None:
        raise UsageError(f"{artifact} names no base model; give one with --reference MODEL")
    return manifest.base_model.name


def session(
    artifact: Path,
    reference: str,
    kv_configs: Sequence[KVCacheConfig],
    gate: Gate,
    *,
    text: Path | None,
    ctx_len: int,
    max_windows: int | None,
    stride: int = 0,
    backend: str = "auto",
    act: str | None = None,
    threads: int | None = None,
    progress: Progress,
) -> list[Evaluation]:
    """Score `artifact` under each KV policy on a text (default: the one that ships).

    Raises UsageError when the artifact's base model isn't the one that it was made from.
    """
    base = resolve_model(reference, progress)
    _check_base(artifact, reference, base)
    held_out = load_text(
        text or default_text(),
        Tokenizer.load(artifact),
        ctx_len=ctx_len,
        max_windows=max_windows,
        stride=stride,
    )
    results = evaluate(
        artifact,
        base,
        kv_configs,
        held_out,
        gate,
        backend=backend,
        act=act,
        threads=threads,
        progress=progress,
    )
    return [replace(item, reference=reference) for item in results]


def _check_base(artifact: Path, reference: str, folder: Path) -> None:
    manifest = read_manifest(artifact)
    if manifest is None or manifest.base_model.name != reference:
        return
    expected = manifest.base_model.sha256
    if expected is not None and open_folder(folder).weights_sha256() != expected:
        raise UsageError(
            f"{reference} isn't the model any more that {artifact} was made from (sha256 "
            f"{expected[:12]}…); restore it, or give a copy with --reference"
        )


def quick_evaluation(
    artifact: Path, gate: Gate, threads: int | None, progress: Progress
) -> list[Evaluation]:
    """The record that every new artifact gets: its KV policy, and bf16 KV beside it.

    None, with a warning, for an architecture that only other engines serve.
    """
    manifest = read_manifest(artifact)
    assert manifest is not None  # `quantize` has just written it
    try:
        limit = max_len(artifact)
    except FormatError as error:
        progress.warn(f"accuracy isn't measured: {error}")
        return []
    policy = manifest.kv_cache.config()
    kv_configs = list(dict.fromkeys((policy, policy.with_dtype("bf16"))))
    results = session(
        artifact,
        manifest.base_model.name,
        kv_configs,
        gate,
        text=None,
        ctx_len=min(QUICK_CTX_LEN, limit),
        max_windows=QUICK_WINDOWS,
        threads=threads,
        progress=progress,
    )
    write_records(artifact, results)
    return results


def check_memory(model: str, max_memory: int | None, progress: Progress) -> None:
    """CapacityError when the quick evaluation of `model`'s artifact would need more than that."""
    if max_memory is None:
        return
    from qdeploy.calibration.memory import require_memory

    folder = open_folder(resolve_model(model, progress))
    # The reference in float32, the artifact in 16 bits at most, and one window's logits.
    logits = 4 * QUICK_CTX_LEN * int(folder.config.get("vocab_size") or 0)
    needed = (4 + 2) * folder.num_weights() + logits
    instead = "give --eval none, and qdeploy eval where there is more"
    require_memory("measuring the artifact", needed, max_memory, instead)


def max_len(artifact: Path) -> int:
    """Positions that the model takes."""
    return spec_from_config(open_folder(artifact).config).max_model_len


def gate_for(manifest: Manifest | None, given: str | None) -> Gate:
    """The gate asked for, else the recipe's, else the default one."""
    recorded = manifest.recipe.get("gate") if manifest is not None else None
    return parse_gate(given or recorded or DEFAULT_GATE)


def enforce(evaluations: Sequence[Evaluation], artifact: Path) -> None:
    """Raise GateError when any evaluation failed its gate."""
    lines = [
        f"kv {item.kv_config.label}: {failure}" for item in evaluations for failure in item.failures
    ]
    if lines:
        raise GateError(
            f"{artifact} failed its accuracy gate ({'; '.join(lines)}); "
            "try more calibration samples, a smaller group size or more bits"
        )


def to_json(evaluation: Evaluation, model: str) -> dict[str, Any]:
    """The object of CONTRACT §1 for one evaluation."""
    text = evaluation.text
    return {
        "model": model,
        "reference": evaluation.reference,
        "backend": evaluation.backend,
        "act": evaluation.act,
        "kv_cache_dtype": evaluation.kv_config.dtype,
        "kv_cache": evaluation.kv_config.key,
        "embeddings": evaluation.embeddings.key if evaluation.embeddings is not None else None,
        "text_sha256": text.sha256,
        "text": text.source,
        "num_tokens": text.num_tokens,
        "ctx_len": text.ctx_len,
        "stride": text.stride,
        "bos": text.bos,
        "metrics": evaluation.metrics,
        "gate": {
            "clauses": str(evaluation.gate),
            "passed": not evaluation.failures,
            "failures": evaluation.failures,
        },
    }
