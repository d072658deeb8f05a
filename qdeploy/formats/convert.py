"""Artifacts and foreign checkpoints in another format: the same codes and scales in other words."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qdeploy import __version__
from qdeploy.errors import FormatError, UsageError
from qdeploy.formats.artifact import DEFAULT_MAX_SHARD_BYTES, ArtifactWriter
from qdeploy.formats.checkpoint import Checkpoint, open_checkpoint
from qdeploy.formats.hf import TensorFolder, open_folder
from qdeploy.formats.kv_scales import CARRIERS, NO_CARRIER, announce_scales, scale_names
from qdeploy.formats.manifest import BaseModelRecord, ExportRecord, LayerRecord, Manifest
from qdeploy.formats.weight_format import WEIGHT_FORMATS, WeightFormat
from qdeploy.progress import Progress, Silent
from qdeploy.quantization.scheme import QuantizedLinear, QuantScheme

#: The `--format` that dequantizes.
DENSE = "dense"
_NOT_LINEAR = ("embed_tokens",)
#: What formats call the static scale of a layer's inputs.
_INPUT_SCALES = ("input_scale", "activation_scale")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportResult:
    """What was written. lossless: every weight has the value that it had in the source."""

    output: Path
    format: str
    scheme: str
    source_format: str
    layers: int
    lossless: bool
    accuracy_records: int
    size_bytes: int


def export_checkpoint(
    source: Path,
    out: Path,
    format: str,
    *,
    name: str | None = None,
    overwrite: bool = False,
    max_shard_size: int = DEFAULT_MAX_SHARD_BYTES,
    progress: Progress | None = None,
) -> ExportResult:
    """Write the checkpoint folder `source`, ours or foreign, as an artifact in `format`.

    Codes, zero points, scales and the order of columns stay as they are, which is checked layer by
    layer; accuracy records stay valid and are kept. `dense` instead dequantizes, rounded to the
    dtype of the embedding; records are dropped. name: of the source in the manifest, default: its
    path. Raises UsageError, naming layer and format, for what `format` can't hold.
    """
    checkpoint, folder = open_checkpoint(source), open_folder(source)
    show = progress or Silent()
    for note in checkpoint.notes:
        show.warn(note)
    if checkpoint.format is None:
        raise UsageError(f"{source} is not quantized; use qdeploy quantize")
    if format not in (*WEIGHT_FORMATS, DENSE):
        known = ", ".join((*WEIGHT_FORMATS, DENSE))
        raise UsageError(f"unknown weight format {format!r}; choose one of {known}", param="format")
    writing = ArtifactWriter(
        out,
        folder,
        overwrite=overwrite,
        max_shard_size=max_shard_size,
        code="auto_map" in folder.config,  # which names the model's own Python files
    )
    target = None if format == DENSE else WEIGHT_FORMATS.get(format)
    export = _Export(checkpoint, folder, target, show)
    with writing as writer:
        export.write(writer, show)
        manifest = export.manifest(name or str(source))
        writer.finish(manifest, export.quantization_config())
    return ExportResult(
        output=out,
        format=format,
        scheme=open_checkpoint(out).scheme_name or DENSE,
        source_format=checkpoint.format,
        layers=len(checkpoint.packed),
        lossless=export.lossless,
        accuracy_records=len(manifest.accuracy),
        size_bytes=sum(path.stat().st_size for path in out.glob("*.safetensors")),
    )


class _Export:
    """One export; target None: dense."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        folder: TensorFolder,
        target: WeightFormat | None,
        progress: Progress,
    ) -> None:
        self.checkpoint, self.folder, self.target = checkpoint, folder, target
        self.lossless = True
        self.schemes = _true_schemes(checkpoint, progress)
        self.kv_scales = scale_names(checkpoint)
        self.quantization_config()  # what can't be mixed must fail before the work

    def write(self, writer: ArtifactWriter, progress: Progress) -> None:
        """All linears in the new format, everything else as stored."""
        packed = self.checkpoint.packed
        with progress.task("converting", len(packed)) as task:
            for module in packed:
                q = replace(_linear(self.checkpoint, module), scheme=self.schemes[module])
                self._write_linear(writer, module, q)
                task.advance(1, module)
        carried = self.target is not None and self.target.name in CARRIERS
        if self.kv_scales and not carried:
            progress.warn(
                f"{len(self.kv_scales)} scales of the KV cache are left out; {NO_CARRIER}"
            )
        for name in sorted(self.folder.names()):
            if name in self.kv_scales and not carried:
                writer.omit(name)
            elif name.rpartition(".")[0] not in packed:
                writer.add_stored(name, self.folder.tensor(name))

    def _write_linear(self, writer: ArtifactWriter, module: str, q: QuantizedLinear) -> None:
        if self.target is None:
            weight = q.dequantize()
            rounded = weight.to(self._dense_dtype())
            self.lossless &= torch.equal(rounded.float(), weight)
            writer.add_unpacked(module, rounded, q.bias)
            return
        if q.input_scale is not None and self.target.name != "compressed-tensors":
            raise UsageError(
                f"{module}: format {self.target.name} holds no static scales of activations; use "
                "--format compressed-tensors",
                param="format",
            )
        tensors = writer.add_linear(module, q, self.target)
        if not _same(self.target.unpack(tensors, q.scheme), q):
            raise FormatError(
                f"{module} changed on its way to {self.target.name}; this is a bug, report it"
            )

    def _dense_dtype(self) -> torch.dtype:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            if name in self.folder.names():
                return self.folder.dtype(name)
        return torch.bfloat16

    def quantization_config(self) -> dict[str, Any] | None:
        """The new config; None for dense."""
        if self.target is None:
            return None
        config = self.target.quantization_config(self.schemes, _dense_linears(self.checkpoint))
        return announce_scales(config) if self.kv_scales else config

    def manifest(self, source: str) -> Manifest:
        """The source's, brought up to date; a foreign checkpoint is its own base model."""
        sha256 = self.folder.weights_sha256()
        found, checkpoint = self.checkpoint.manifest, self.checkpoint
        if found is None:
            base = BaseModelRecord(name=source, sha256=sha256)
            method = str(checkpoint.format)
            found = Manifest(base_model=base, recipe={"method": method}, layers=_records(self))
        format = DENSE if self.target is None else self.target.name
        layers = [
            layer.model_copy(update={"scheme": self.schemes[layer.name].name})
            for layer in found.layers
            if self.target is not None and layer.name in self.schemes
        ]
        changed = {
            "recipe": found.recipe | {"format": format},
            "layers": layers,
            "accuracy": found.accuracy if self.target is not None else [],
            "exported": ExportRecord(
                source=source, format=checkpoint.format or DENSE, sha256=sha256
            ),
            "created_by": found.created_by | {"qdeploy": __version__},
        }
        return found.model_copy(update=changed)


def _records(export: _Export) -> list[LayerRecord]:
    return [LayerRecord(name=name, scheme=s.name) for name, s in export.schemes.items()]


def _linear(checkpoint: Checkpoint, module: str) -> QuantizedLinear:
    q = checkpoint.linear(module)
    assert isinstance(q, QuantizedLinear)
    stored = [f"{module}.{n}" for n in _INPUT_SCALES if checkpoint.has(f"{module}.{n}")]
    if q.input_scale is None and stored:
        q.input_scale = checkpoint.tensor(stored[0]).reshape(1)
    return q


def _true_schemes(checkpoint: Checkpoint, progress: Progress) -> dict[str, QuantScheme]:
    """By module: symmetric where every layer of a scheme is, and activation order where one has it.

    A config says less than the data: AWQ stores zero points of symmetric weights, too, and GPTQ's
    static groups leave no trace of the order.
    """
    symmetric: dict[QuantScheme, bool] = {}
    ordered: dict[QuantScheme, bool] = {}
    schemes = checkpoint.schemes
    with progress.task("reading", len(schemes)) as task:
        for module, scheme in schemes.items():
            q = _linear(checkpoint, module)
            middle = scheme.number != "int" or bool((q.zero_points == scheme.mid_code).all())
            symmetric[scheme] = symmetric.get(scheme, True) and middle
            order = scheme.act_order and q.g_idx is not None
            ordered[scheme] = ordered.get(scheme, False) or order
            task.advance(1, module)
    return {
        module: replace(scheme, symmetric=symmetric[scheme], act_order=ordered[scheme])
        for module, scheme in schemes.items()
    }


def _dense_linears(checkpoint: Checkpoint) -> list[str]:
    """Full names of the linears that stay dense; the head, tied or not, is always named."""
    modules = {
        name.removesuffix(".weight")
        for name in checkpoint.names()
        if name.endswith(".weight") and len(checkpoint.shape(name)) == 2
    }
    dense = modules - checkpoint.packed.keys()
    head = set() if "lm_head" in checkpoint.packed else {"lm_head"}
    return sorted({name for name in dense if not name.endswith(_NOT_LINEAR)} | head)


def _same(left: QuantizedLinear, right: QuantizedLinear) -> bool:
    """Equal codes, zero points, scales (as numbers), order of columns, bias and input scale."""

    def equal(a: Tensor | None, b: Tensor | None) -> bool:
        return (a is None and b is None) or (
            a is not None and b is not None and torch.equal(a.float(), b.float())
        )

    parts = ("codes", "zero_points", "scales", "g_idx", "bias", "input_scale")
    return all(equal(getattr(left, part), getattr(right, part)) for part in parts)
