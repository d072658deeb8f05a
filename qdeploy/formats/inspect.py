"""What an artifact is, whether it is whole, and who else can read it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from qdeploy.errors import QdeployError
from qdeploy.formats.checkpoint import Checkpoint, checksum_findings, open_checkpoint
from qdeploy.formats.hf import COMPILED
from qdeploy.formats.kv_scales import read_scales, scale_findings, scales_line
from qdeploy.formats.manifest import Manifest
from qdeploy.formats.model_card import embeddings_line
from qdeploy.formats.readers import readers_for, readers_that_fail
from qdeploy.formats.weight_format import activations_note
from qdeploy.quantization.embeddings import table_bytes

#: Tensors that an embeddings policy applies to.
TABLE_TENSORS = ("model.embed_tokens.weight", "lm_head.weight")
_DECODER_LAYER = re.compile(r"(?:^|\.)layers\.\d+\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """The result of `inspect_artifact`; no findings means that everything checked is right.

    loaded_bytes: see the function of that name.
    bits_per_weight: stored bits, scales and all, over the weights of the decoder's linears.
    format: a name of WEIGHT_FORMATS, or None for dense; None too when it couldn't be opened.
    activations: what qdeploy and others make of activations, where that differs.
    kv_scales: stored static scales of the KV cache, by layer, `k` and `v`.
    notes: what was read in another way than the files say.
    """

    path: Path
    manifest: Manifest | None
    findings: list[str]
    size_bytes: int
    loaded_bytes: int | None = None
    bits_per_weight: float | None = None
    format: str | None = None
    scheme: str | None = None
    activations: str | None = None
    kv_scales: dict[int, dict[str, float]] = field(default_factory=dict)
    readers: list[str] = field(default_factory=list)
    failing_readers: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The object of `qdeploy inspect --json`."""
        return {
            "path": str(self.path),
            "format": self.format,
            "scheme": self.scheme,
            "activations": self.activations,
            "size_bytes": self.size_bytes,
            "loaded_bytes": self.loaded_bytes,
            "bits_per_weight": self.bits_per_weight,
            "kv_scales": {str(layer): scales for layer, scales in self.kv_scales.items()},
            "readers": self.readers,
            "failing_readers": self.failing_readers,
            "notes": self.notes,
            "findings": self.findings,
            "manifest": self.manifest.model_dump(mode="json") if self.manifest else None,
        }

    def lines(self) -> list[str]:
        """The text of `qdeploy inspect`."""
        lines = [f"{self.path}: {self.scheme or 'dense'} ({self.format or 'no weight format'})"]
        lines.append(f"size: {self.size_bytes / 1e6:.1f} MB")
        if self.bits_per_weight is not None:
            lines[-1] += f", {self.bits_per_weight:.3f} bits per decoder weight"
        if self.loaded_bytes is not None:
            lines[-1] += f"; weights {self.loaded_bytes / 1e6:.1f} MB once loaded"
        lines.extend(_manifest_lines(self.manifest))
        if self.activations is not None:
            lines.append(self.activations)
        if self.kv_scales:
            lines.append(scales_line(self.kv_scales))
        lines.append(f"other readers tested: {'; '.join(self.readers) or 'none'}")
        if self.failing_readers:
            lines.append(f"readers that failed: {'; '.join(self.failing_readers)}")
        lines.extend(f"note: {note}" for note in self.notes)
        lines.extend(f"finding: {finding}" for finding in self.findings)
        return lines


def inspect_artifact(path: Path, verify: bool = False) -> Inspection:
    """Open a checkpoint and check it; what is broken becomes a finding, not an exception.

    Every packed layer's scales are read; `verify` also compares sha256 with the manifest.
    """
    path = Path(path)
    size = _size_bytes(path)
    try:
        checkpoint = open_checkpoint(path)
    except QdeployError as error:
        return Inspection(path=path, manifest=None, findings=[str(error)], size_bytes=size)
    findings = _layer_findings(checkpoint) + _policy_findings(checkpoint.manifest)
    kv_scales = read_scales(checkpoint)
    findings += scale_findings(checkpoint.config, kv_scales)
    if verify:
        findings += _verify(path, checkpoint.manifest)
    return Inspection(
        path=path,
        manifest=checkpoint.manifest,
        findings=findings,
        notes=checkpoint.notes,
        size_bytes=size,
        loaded_bytes=None if findings else loaded_bytes(checkpoint),
        bits_per_weight=bits_per_weight(checkpoint),
        format=checkpoint.format,
        scheme=checkpoint.scheme_name,
        activations=activations_note(checkpoint.schemes.values()),
        kv_scales=kv_scales,
        readers=readers_of(checkpoint),
        failing_readers=failing_readers_of(checkpoint),
    )


def _size_bytes(folder: Path) -> int:
    """Bytes of the model's files; what was compiled from them can be made again."""
    files = (file for file in folder.rglob("*") if file.is_file())
    return sum(f.stat().st_size for f in files if COMPILED not in f.relative_to(folder).parts[:-1])


def readers_of(checkpoint: Checkpoint) -> list[str]:
    """Engines that gave our logits on such a checkpoint in our tests; a dense one is
    transformers' own.
    """
    if checkpoint.format is None:
        return ["transformers"]
    return readers_for(checkpoint.format, checkpoint.schemes.values())


def failing_readers_of(checkpoint: Checkpoint) -> list[str]:
    """Engines that were tried on such a checkpoint and didn't give our logits."""
    if checkpoint.format is None:
        return []
    return readers_that_fail(checkpoint.format, checkpoint.schemes.values())


def bits_per_weight(checkpoint: Checkpoint) -> float | None:
    """Stored bits per weight over all linears of the decoder layers, packed or dense.

    Counts real bytes: words with their padding, scales, zero points, group index, biases.
    None when the checkpoint has no decoder layers.
    """
    weights = stored = 0
    for module, (out_features, in_features) in checkpoint.packed.items():
        weights += out_features * in_features
        stored += checkpoint.stored_bytes(module)
    for name in checkpoint.names():
        module, _, last = name.rpartition(".")
        shape = checkpoint.shape(name)
        dense = module not in checkpoint.packed
        if dense and last == "weight" and len(shape) == 2 and _DECODER_LAYER.search(name):
            weights += prod(shape)
            stored += checkpoint.stored_bytes(module)
    return stored * 8 / weights if weights else None


def loaded_bytes(checkpoint: Checkpoint) -> int:
    """Bytes of all weights as stored, but embedding and head as the embeddings policy has them.

    An executor that computes on packed weights holds about that much; the reference executor
    dequantizes to float32 and holds more. Raises UsageError for an unknown policy.
    """
    size = sum(checkpoint.nbytes(name) for name in checkpoint.names())
    manifest = checkpoint.manifest
    if manifest is None or manifest.embeddings is None:
        return size
    scheme = manifest.embeddings.scheme()
    for name in TABLE_TENSORS:
        if checkpoint.has(name):
            rows, hidden = checkpoint.shape(name)
            size += table_bytes((rows, hidden), scheme) - checkpoint.nbytes(name)
    return size


def _layer_findings(checkpoint: Checkpoint) -> list[str]:
    findings = []
    for module in checkpoint.packed:
        try:
            checkpoint.linear(module)
        except QdeployError as error:
            findings.append(str(error))
    return findings


def _policy_findings(manifest: Manifest | None) -> list[str]:
    findings = []
    if manifest is not None:
        try:
            manifest.kv_cache.config()
        except QdeployError as error:
            findings.append(f"kv_cache in qdeploy.json: {error}")
        try:
            if manifest.embeddings is not None:
                manifest.embeddings.scheme()
        except QdeployError as error:
            findings.append(f"embeddings in qdeploy.json: {error}")
    return findings


def _verify(path: Path, manifest: Manifest | None) -> list[str]:
    if manifest is None:
        return ["no qdeploy.json, so no checksums to verify; inspect it without --verify"]
    return checksum_findings(path, manifest)


def _manifest_lines(manifest: Manifest | None) -> list[str]:
    if manifest is None:
        return ["manifest: none (not made by qdeploy)"]
    lines = [
        f"base model: {manifest.base_model.name}",
        f"KV cache: {manifest.kv_cache.key}",
        *_statistics_lines(manifest),
        f"embedding and head: {embeddings_line(manifest)}",
        f"quantized layers: {len(manifest.layers)}",
    ]
    for record in manifest.accuracy:
        metrics = ", ".join(f"{name} {value:.4g}" for name, value in record.metrics.items())
        verdict = {True: "passed", False: "failed", None: "no gate"}[record.passed]
        stale = "" if record.embeddings == manifest.embeddings else ", other embeddings"
        lines.append(
            f"accuracy at {record.key} ({record.backend}, {record.act}{stale}): "
            f"{verdict}; {metrics}"
        )
    return lines


def _statistics_lines(manifest: Manifest) -> list[str]:
    """Which layers the data asked for, and how near the others are to needing more."""
    tried = [record for record in manifest.kv_cache.statistics if record.errors]
    if not tried:
        return []
    cheapest = next(iter(tried[0].errors))
    worst = max(tried, key=lambda record: record.errors[cheapest])
    return [
        f"KV cache by layer: {cheapest} changes attention by {worst.errors[cheapest]:.1%} at most "
        f"(layer {worst.layer}, {worst.tried} calibration queries)"
    ]
