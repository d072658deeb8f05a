"""The artifact's README.md: base model, recipe, accuracy, how to serve."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from qdeploy.formats.manifest import AccuracyRecord, Manifest, write_atomic
from qdeploy.formats.readers import readers_for
from qdeploy.formats.weight_format import activations_note
from qdeploy.quantization.scheme import QuantScheme

CARD_NAME = "README.md"
_BEGIN = "<!-- qdeploy: accuracy, rewritten by `qdeploy eval` -->"
_END = "<!-- qdeploy: end of accuracy -->"
_METRICS = ("perplexity", "reference_perplexity", "kl_mean", "kl_p99", "top1_agreement")


def render_card(
    name: str, manifest: Manifest, method: str | None, schemes: Sequence[QuantScheme]
) -> str:
    """The whole card of an artifact called `name`; method: quant_method of its config, None with
    no schemes for an unquantized one. The first scheme is most layers'.
    """
    base, kv = manifest.base_model, manifest.kv_cache
    weights = "; some layers ".join(_weights(scheme) for scheme in schemes)
    kind = f"{method}, {weights}" if schemes else "unquantized"
    note = activations_note(schemes)
    return "\n".join(
        [
            "---",
            "library_name: transformers",
            f"base_model: {json.dumps(base.name)}",
            "tags: [qdeploy, quantized]",
            "---",
            f"# {name}",
            "",
            f"`{base.name}`, quantized with [qdeploy](qdeploy.json): {kind}.",
            "",
            f"- Base weights: sha256 `{base.sha256 or 'not recorded'}`"
            + (f", revision `{base.revision}`" if base.revision else ""),
            f"- KV cache: {kv.dtype}, blocks of {kv.block_size} tokens, "
            f"{kv.sink_blocks} sink and {kv.residual_blocks} residual blocks unquantized"
            + "".join(f"; layer {layer.layer}: {layer.dtype}" for layer in kv.layers),
            f"- Embedding and head: {embeddings_line(manifest)}",
            *([f"- Activations: {note}"] if note else []),
            f"- {_calibration(manifest)}",
            *_export_lines(manifest),
            "",
            "## Accuracy",
            _accuracy_section(manifest),
            "",
            "## Serve",
            "```",
            "qdeploy serve .",
            "```",
            f"It is also a plain Hugging Face checkpoint; {_readers(manifest, schemes)}.",
            "",
            "## Recipe",
            "```json",
            json.dumps(manifest.recipe, indent=2, ensure_ascii=False, default=str),
            "```",
            "",
        ]
    )


def _weights(scheme: QuantScheme) -> str:
    """How weights are held, in words."""
    if scheme.number == "int":
        groups = f"groups of {scheme.group_size}"
        return f"{scheme.bits} bits, {'one group a row' if scheme.group_size == -1 else groups}"
    if scheme.group_size == -1:
        per = "tensor" if scheme.block_rows == -1 else "row"
    else:
        per = f"block of {scheme.block_rows} × {scheme.group_size}"
    return f"8-bit floats (E4M3), one scale a {per}"


def refresh_card(folder: Path, manifest: Manifest) -> None:
    """Replace the accuracy section; a card without its markers (an edited one) stays as it is."""
    path = folder / CARD_NAME
    if not path.is_file():
        return
    text = path.read_text(encoding="utf-8")
    head, begin, rest = text.partition(_BEGIN)
    _, end, tail = rest.partition(_END)
    if begin and end:
        write_atomic(path, head + _accuracy_section(manifest) + tail)


def embeddings_line(manifest: Manifest) -> str:
    """What the files hold, and what qdeploy makes of it."""
    if manifest.embeddings is None:
        return "as stored"
    return f"stored dense for every reader; qdeploy rounds them to {manifest.embeddings.key}"


def _calibration(manifest: Manifest) -> str:
    calibration = manifest.calibration
    if calibration is None:
        return "Calibration: none"
    return (
        f"Calibration: {calibration.source}, {calibration.samples_used} of "
        f"{calibration.samples_requested} samples asked for, {calibration.tokens} tokens"
    )


def _readers(manifest: Manifest, schemes: Sequence[QuantScheme]) -> str:
    """Who else reads it, by our tests."""
    if not schemes:
        return "transformers reads it"
    names = readers_for(str(manifest.recipe.get("format")), schemes)
    return (
        f"these gave the same logits in our tests: {'; '.join(names)}"
        if names
        else ("no other reader of this format and scheme was tested")
    )


def _export_lines(manifest: Manifest) -> list[str]:
    source = manifest.exported
    if source is None:
        return []
    return [f"- Converted from `{source.source}` ({source.format}, sha256 `{source.sha256}`)"]


def _accuracy_section(manifest: Manifest) -> str:
    body = _table(manifest.accuracy) if manifest.accuracy else ["Not measured; `qdeploy eval .`"]
    return "\n".join([_BEGIN, *body, _END])


def _table(records: list[AccuracyRecord]) -> list[str]:
    shown = [name for name in _METRICS if any(name in record.metrics for record in records)]
    columns = [
        "KV cache",
        "backend",
        "activations",
        *(name.replace("_", " ") for name in shown),
        "tokens",
        "gate",
    ]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for record in records:
        values = [f"{record.metrics[n]:.4g}" if n in record.metrics else "" for n in shown]
        verdict = {True: "passed", False: "failed", None: "none"}[record.passed]
        gate = f"{record.gate}: {verdict}" if record.gate else verdict
        cells = [record.key, record.backend, record.act, *values, str(record.num_tokens), gate]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return lines
