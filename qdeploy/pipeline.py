"""Quantize a checkpoint end to end: read, calibrate, quantize layer by layer, write."""

from __future__ import annotations

import json
import platform
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from qdeploy import __version__
from qdeploy.calibration.capture import find_input_groups, forward_dtype, run_layer
from qdeploy.calibration.dataset import CalibrationData, load_calibration
from qdeploy.calibration.kv_policy import KVCalibration, policy_notes
from qdeploy.calibration.plan import QuantPlan, make_plan
from qdeploy.calibration.resume import ResumeStore
from qdeploy.calibration.walk import DecoderWalk, pick_sequences
from qdeploy.errors import FormatError, UsageError
from qdeploy.formats.artifact import DEFAULT_MAX_SHARD_BYTES, ArtifactWriter
from qdeploy.formats.checkpoint import open_checkpoint
from qdeploy.formats.hf import open_folder
from qdeploy.formats.inspect import bits_per_weight, loaded_bytes, readers_of
from qdeploy.formats.kv_scales import CARRIERS, NO_CARRIER, add_scales
from qdeploy.formats.manifest import (
    BaseModelRecord,
    CalibrationRecord,
    CapacityRecord,
    EmbeddingsRecord,
    KVCacheRecord,
    LayerRecord,
    Manifest,
)
from qdeploy.formats.sources import resolve_model
from qdeploy.kv.auto import KVLayerStats
from qdeploy.kv.config import KVCacheConfig
from qdeploy.kv.pool import bytes_per_token
from qdeploy.models.spec import spec_from_config
from qdeploy.progress import Progress, Silent
from qdeploy.quantization.embeddings import table_scheme
from qdeploy.quantization.method import (
    LayerBatch,
    LayerContext,
    LayerOutcome,
    LinearReport,
    Observer,
)
from qdeploy.recipes import Recipe

#: Tokens on which AWQ tries its scales: enough to rank them, few enough for minutes on a CPU.
SEARCH_TOKENS = 1024
FEW_TOKENS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeResult:
    """What was made. Sizes are bytes of safetensors files; bits_per_weight is of the stored
    decoder linears, scales and all; loaded_bytes: of the weights once the embeddings policy is
    applied, see `loaded_bytes`; embeddings: that policy; readers: other engines tested on such
    files.
    """

    output: Path
    size_bytes: int
    source_bytes: int
    loaded_bytes: int
    bits_per_weight: float
    scheme: str
    format: str
    kv_cache: str
    embeddings: str | None
    readers: list[str] = field(default_factory=list)
    layers: list[dict[str, Any]] = field(default_factory=list)
    seconds: float
    peak_rss_bytes: int
    warnings: list[str] = field(default_factory=list)


def quantize_checkpoint(
    model: str,
    out: str | Path,
    recipe: Recipe,
    *,
    overwrite: bool = False,
    resume: bool = True,
    max_shard_size: int = DEFAULT_MAX_SHARD_BYTES,
    progress: Progress | None = None,
) -> QuantizeResult:
    """Quantize `model` (any reference that `resolve_model` takes) into the artifact folder `out`.

    Raises a QdeployError before any calibration when the recipe can't be honoured. A killed run
    goes on from its last finished layer, unless `resume` is False or anything changed.
    """
    run = _Run(model, Path(out), recipe, progress or Silent())
    return run.run(overwrite, resume, max_shard_size)


class _Run:
    def __init__(self, model: str, out: Path, recipe: Recipe, progress: Progress) -> None:
        self.start = time.monotonic()
        self.model, self.out, self.progress = model, out, progress
        self.kv = recipe.kv_cache.config()  # a policy that can't be must fail before the work
        self.kv_calibration = (
            KVCalibration(recipe.kv_cache) if recipe.kv_cache.needs_statistics else None
        )
        self.kv_statistics: list[KVLayerStats] = []
        self.folder = open_folder(resolve_model(model, progress))
        _kv_bytes_per_token(self.folder.config, self.kv)  # a layer that the model hasn't got
        if "quantization_config" in self.folder.config:
            raise UsageError(f"{model} is quantized already; give its unquantized base model")
        quantizes = recipe.method != "none"
        walks = quantizes or self.kv_calibration is not None
        self.walk = DecoderWalk(self.folder) if walks else None
        self.plan = make_plan(self.folder, self.walk if quantizes else None, recipe)
        self.embeddings = _embeddings(recipe, self.folder.config)
        self.recipe = self.plan.recipe
        self.warnings: list[str] = []
        self.layers: list[LayerRecord] = []
        self._written: set[str] = set()

    def run(self, overwrite: bool, resume: bool, max_shard_size: int) -> QuantizeResult:
        """Write the artifact; see quantize_checkpoint."""
        for note in self.plan.notes:
            self.progress.info(note)
        store: ResumeStore | None = None
        data: CalibrationData | None = None
        writing = ArtifactWriter(
            self.out, self.folder, overwrite=overwrite, max_shard_size=max_shard_size
        )
        with writing as writer:
            if self.walk is not None:
                data = self._calibration()
                fingerprint = self._fingerprint(data)
                store = ResumeStore(self.out, fingerprint, self.progress, enabled=resume)
                self._quantize(self.walk, writer, store, data)
            self._copy_rest(writer)
            config = self._kv_policy(writer)
            writer.finish(self._manifest(data), config)
        if store is not None:
            store.remove()
        return self._result()

    def _calibration(self) -> CalibrationData | None:
        method, kv = self.plan.method, self.kv_calibration
        if kv is None and (method is None or not method.needs_calibration):
            return None
        from qdeploy.runtime.tokenizer import Tokenizer

        tokenizer = Tokenizer.load(self.folder.path)
        data = load_calibration(self.recipe.calibration, tokenizer)
        for note in data.notes:
            self.progress.info(note)
        if data.tokens < FEW_TOKENS:
            self._warn(f"{data.tokens} calibration tokens: statistics are poor, give more text")
        if kv is not None:
            kv.check(data.sequences)
        return data

    def _quantize(
        self,
        walk: DecoderWalk,
        writer: ArtifactWriter,
        store: ResumeStore,
        data: CalibrationData | None,
    ) -> None:
        count = len(walk.layers)
        hidden: list[Tensor] = []
        if data is not None:
            hidden = walk.embed(data.sequences)
            self.progress.info(self.plan.memory_note(walk, data.tokens))
            if 0 < store.finished < count:
                hidden = store.load_inputs()
        with self.progress.task(f"quantizing ({self.recipe.method})", count) as task:
            for index in range(count):
                if index < store.finished:
                    outcome, kv = store.load(index, self.plan.scheme)
                else:
                    outcome, kv = self._layer(walk, index, hidden)
                    store.save(index, outcome, kv)
                    hidden = outcome.outputs
                self.kv_statistics += [kv] if kv is not None else []
                self._write(walk.layer_name(index), outcome, writer)
                task.advance(1, walk.layer_name(index))

    def _layer(
        self, walk: DecoderWalk, index: int, hidden: list[Tensor]
    ) -> tuple[LayerOutcome, KVLayerStats | None]:
        """One layer quantized, and what calibration saw of its K and V before that."""
        name, kv = walk.layer_name(index), None
        with walk.layer(index) as layer:
            batches = walk.batches(index, hidden) if hidden else []
            if self.kv_calibration is not None:
                kv = self.kv_calibration.observe(index, name, layer, walk.config, batches)
            method = self.plan.method
            if method is not None and method.needs_calibration:
                return self._quantize_layer(walk, index, layer, batches), kv
            outcome = self._quantize_layer(walk, index, layer, [])
            if index + 1 < len(walk.layers):  # the next layer's statistics alone want inputs
                outcome.outputs = run_layer(layer, batches, dtype=forward_dtype())
            return outcome, kv

    def _quantize_layer(
        self, walk: DecoderWalk, index: int, layer: nn.Module, batches: list[LayerBatch]
    ) -> LayerOutcome:
        method = self.plan.method
        if method is None:
            return LayerOutcome(linears={})
        name, targets = walk.layer_name(index), self.plan.targets[index]
        store_dtypes = {
            local: self.folder.dtype(f"{name}.{local}") for local, _ in layer.named_parameters()
        }

        def forward(
            observers: dict[str, Observer] | None = None, stop_after: str | None = None
        ) -> list[Tensor]:
            return run_layer(layer, batches, observers, stop_after, dtype=forward_dtype())

        search = pick_sequences(batches, SEARCH_TOKENS) if batches else []
        groups = find_input_groups(layer, name, search[0], targets) if batches else ()
        context = LayerContext(
            layer=layer,
            name=name,
            targets=targets,
            input_groups=groups,
            scheme=self.plan.scheme,
            model_type=walk.model_type,
            head_dim=walk.head_dim,
            store_dtypes=store_dtypes,
            forward=forward if batches else None,  # type: ignore[arg-type]
            search_batches=search,
            is_last=index == len(walk.layers) - 1,
            warn=self._warn,
        )
        return method.quantize_layer(context)

    def _write(self, prefix: str, outcome: LayerOutcome, writer: ArtifactWriter) -> None:
        for name, q in outcome.linears.items():
            writer.add_linear(f"{prefix}.{name}", q, self.plan.format)
        for name, tensor in outcome.dense.items():
            writer.add(f"{prefix}.{name}", tensor)
        self._written |= {f"{prefix}.{name}" for name in outcome.dense}
        self.layers += [_record(prefix, report, self.plan) for report in outcome.reports]

    def _copy_rest(self, writer: ArtifactWriter) -> None:
        """Everything else as stored: embeddings, head, norms, ignored layers."""
        packed = {
            f"model.layers.{index}.{name}"
            for index, names in enumerate(self.plan.targets)
            for name in names
        }
        for name in sorted(self.folder.names() - self._written):
            if name.rpartition(".")[0] not in packed:
                writer.add(name, self.folder.tensor(name))

    def _kv_policy(self, writer: ArtifactWriter) -> dict[str, Any] | None:
        """Settle the KV policy, write static scales; returns the quantization config."""
        config = self.plan.quantization_config()
        if self.kv_calibration is None:
            return config
        self.kv = self.kv_calibration.config(self.kv_statistics)
        for note in policy_notes(self.kv, self.kv_statistics):
            self.progress.info(note)
        if self.kv.dtype != "fp8":
            return config
        if config is None or self.plan.format not in CARRIERS:
            self.progress.info(f"format {self.plan.format} carries no KV scales; {NO_CARRIER}")
            return config
        dtype = self.folder.dtype("model.embed_tokens.weight")
        return add_scales(writer, config, self.kv_statistics, dtype)

    def _manifest(self, data: CalibrationData | None) -> Manifest:
        calibration = None
        if data is not None:
            calibration = CalibrationRecord(
                source=data.source,
                sha256=data.sha256,
                samples_used=data.samples_used,
                samples_requested=data.samples_requested,
                tokens=data.tokens,
            )
        return Manifest(
            base_model=BaseModelRecord(name=self.model, sha256=self.folder.weights_sha256()),
            recipe=self.recipe.model_copy(update={"model": self.model}).model_dump(mode="json"),
            calibration=calibration,
            layers=self.layers,
            kv_cache=KVCacheRecord.of(self.kv).with_statistics(self.kv_statistics),
            embeddings=self.embeddings,
            capacity=CapacityRecord(
                kv_bytes_per_token=_kv_bytes_per_token(self.folder.config, self.kv)
            ),
            created_by=_versions(),
        )

    def _fingerprint(self, data: CalibrationData | None) -> dict[str, str]:
        later = {"model", "quantize_embeddings", "gate", "format"}  # no layer knows
        later |= {"kv_cache"} if self.kv_calibration is None else set()
        kept = self.recipe.model_dump(mode="json", exclude=later)
        return {
            "weights": self.folder.weights_sha256(),
            "recipe": json.dumps(kept, sort_keys=True),
            "calibration": data.sha256 if data is not None else "",
            "forward_dtype": str(forward_dtype()),
            "versions": json.dumps(_versions(), sort_keys=True),
        }

    def _warn(self, message: str) -> None:
        self.warnings.append(message)
        self.progress.warn(message)

    def _result(self) -> QuantizeResult:
        size, source = _weight_bytes(self.out), _weight_bytes(self.folder.path)
        self.progress.info(f"size: {source / 1e6:.1f} MB before, {size / 1e6:.1f} MB after")
        written = open_checkpoint(self.out)  # what was written must open again
        quantized = self.plan.method is not None
        if quantized and size >= source:
            self._warn(f"the artifact ({size} bytes) is not smaller than its source ({source})")
        return QuantizeResult(
            output=self.out,
            size_bytes=size,
            source_bytes=source,
            loaded_bytes=loaded_bytes(written),
            bits_per_weight=bits_per_weight(written) or 0.0,
            readers=readers_of(written),
            scheme=self.plan.scheme.name if quantized else "dense",
            format=self.plan.format,
            kv_cache=self.kv.key,
            embeddings=self.embeddings.key if self.embeddings is not None else None,
            layers=[record.model_dump(mode="json") for record in self.layers],
            seconds=time.monotonic() - self.start,
            peak_rss_bytes=_peak_rss_bytes(),
            warnings=self.warnings,
        )


def _record(prefix: str, report: LinearReport, plan: QuantPlan) -> LayerRecord:
    fields = asdict(report) | {"name": f"{prefix}.{report.name}", "scheme": plan.scheme.name}
    return LayerRecord(**fields)


def _embeddings(recipe: Recipe, config: dict[str, Any]) -> EmbeddingsRecord | None:
    """The policy asked for; FormatError for a model that the runtime, and so the policy, can't."""
    if recipe.quantize_embeddings is None:
        return None
    hidden_size = spec_from_config(config).hidden_size
    return EmbeddingsRecord.of(table_scheme(recipe.quantize_embeddings, hidden_size))


def _versions() -> dict[str, str]:
    return {
        "qdeploy": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def _kv_bytes_per_token(config: dict[str, Any], kv: KVCacheConfig) -> float | None:
    """Stored bytes of one token's K and V; None for a model that the runtime doesn't serve.

    UsageError when the policy names a layer that the model hasn't got.
    """
    try:
        spec = spec_from_config(config)
    except FormatError:
        return None
    return bytes_per_token(spec, kv)


def _weight_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _peak_rss_bytes() -> int:
    """Peak resident memory of this process; Linux counts in KiB, macOS in bytes."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
