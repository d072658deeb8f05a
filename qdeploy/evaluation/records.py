"""Evaluations as accuracy records in an artifact's manifest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from qdeploy.errors import FormatError
from qdeploy.evaluation.evaluate import Evaluation
from qdeploy.formats.manifest import AccuracyRecord, KVPolicyRecord, read_manifest, write_manifest


def to_record(evaluation: Evaluation) -> AccuracyRecord:
    """The manifest's form of an evaluation."""
    text = evaluation.text
    return AccuracyRecord(
        **KVPolicyRecord.of(evaluation.kv_config).model_dump(),
        backend=evaluation.backend,
        embeddings=evaluation.embeddings,
        act=evaluation.act,
        reference=evaluation.reference,
        text_sha256=text.sha256,
        num_tokens=text.num_tokens,
        ctx_len=text.ctx_len,
        metrics=evaluation.metrics,
        gate=str(evaluation.gate),
        passed=not evaluation.failures,
    )


def write_records(artifact: Path, evaluations: Sequence[Evaluation]) -> None:
    """Add the evaluations to the artifact's manifest, replacing older ones of the same policy."""
    manifest = read_manifest(artifact)
    if manifest is None:
        raise FormatError(f"{artifact} has no qdeploy.json to write to; use --no-write")
    for evaluation in evaluations:
        manifest = manifest.with_record(to_record(evaluation))
    write_manifest(artifact, manifest)
