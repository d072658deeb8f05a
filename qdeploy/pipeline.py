"""Quantize a checkpoint end to end: read, calibrate, quantize layer by layer, write."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from qdeploy import __version__
from qdeploy.calibration.activations import Spill
from qdeploy.calibration.capture import Keep
from qdeploy.calibration.dataset import CalibrationData, load_calibration
from qdeploy.calibration.kv_policy import KVCalibration, policy_notes
from qdeploy.calibration.layers import LayerRunner
from qdeploy.calibration.memory import (
    MemoryPlan,
    peak_resident_bytes,
    plan_memory,
    require_memory,
    resident_bytes,
)
from qdeploy.calibration.plan import QuantPlan, make_plan
from qdeploy.calibration.resume import ResumeStore
from qdeploy.calibration.walk import DecoderWalk
from qdeploy.engines.run import engine_run
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
from qdeploy.kv.groups import require_layers
from qdeploy.kv.pool import bytes_per_token
from qdeploy.models.spec import spec_from_config
from qdeploy.progress import Progress, Silent
from qdeploy.quantization.embeddings import table_scheme
from qdeploy.quantization.method import LayerOutcome, LinearReport
from qdeploy.quantization.numerics import forward_dtype
from qdeploy.recipes import Recipe


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
    max_memory: int | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> QuantizeResult:
    """Quantize `model` (any reference that `resolve_model` takes) into the artifact folder `out`.

    max_memory: bytes that the process may have resident at its peak; None: what the machine has.
    trust_remote_code: Python code that the model brings may run, and is copied into the artifact.
    Raises a QdeployError before any calibration when the recipe can't be honoured. A killed run
    goes on from its last finished layer, unless `resume` is False or anything changed.
    """
    options = RunOptions(
        overwrite=overwrite,
        resume=resume,
        max_shard_size=max_shard_size,
        max_memory=max_memory,
        trust_remote_code=trust_remote_code,
    )
    return _Run(model, Path(out), recipe, options, progress or Silent()).run()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What isn't in a recipe, as quantize_checkpoint says."""

    overwrite: bool
    resume: bool
    max_shard_size: int
    max_memory: int | None
    trust_remote_code: bool


class _Run:
    def __init__(
        self, model: str, out: Path, recipe: Recipe, options: RunOptions, progress: Progress
    ) -> None:
        self.start = time.monotonic()
        self.model, self.out, self.progress = model, out, progress
        self.options = options
        self.kv = recipe.kv_cache.config()  # a policy that can't be must fail before the work
        self.kv_calibration = (
            KVCalibration(recipe.kv_cache) if recipe.kv_cache.needs_statistics else None
        )
        self.kv_statistics: list[KVLayerStats] = []
        trusted = options.trust_remote_code
        self.folder = open_folder(resolve_model(model, progress, code=trusted))
        _kv_bytes_per_token(self.folder.config, self.kv)  # a layer that the model hasn't got
        if "quantization_config" in self.folder.config:
            raise UsageError(f"{model} is quantized already; give its unquantized base model")
        quantizes = recipe.method != "none"
        self.walk = None
        if quantizes or self.kv_calibration is not None:
            self.walk = DecoderWalk(self.folder, trust_remote_code=trusted)
            require_layers(self.kv, len(self.walk.layers))
        self.plan = make_plan(self.folder, self.walk if quantizes else None, recipe)
        self.engine = engine_run(self.plan, self.folder, progress, options.max_memory, trusted)
        self.embeddings = _embeddings(recipe, self.folder.config)
        self.recipe = self.plan.recipe
        self.warnings: list[str] = []
        self.created_by = _versions()
        self.layers: list[LayerRecord] = []
        self._written: set[str] = set()

    def run(self) -> QuantizeResult:
        """Write the artifact; see quantize_checkpoint."""
        for note in self.plan.notes:
            self.progress.info(note)
        store: ResumeStore | None = None
        data: CalibrationData | None = None
        writing = ArtifactWriter(
            self.out,
            self.folder,
            overwrite=self.options.overwrite,
            max_shard_size=self.options.max_shard_size,
            code=self.options.trust_remote_code,
        )
        with writing as writer:
            if self.walk is not None:
                data = self._calibration()
            if self.engine is not None and data is not None:
                self.created_by["engine"] = self.engine.version()
                made = self.engine.run(data.sequences, self.plan, self.folder, writer)
                self.layers, self._written = made
            elif self.walk is not None:
                memory = self._memory(self.walk, data)
                fingerprint = self._fingerprint(data, memory)
                store = ResumeStore(
                    self.out, fingerprint, self.progress, enabled=self.options.resume
                )
                with store:
                    self._quantize(self.walk, writer, store, data, memory)
            self._copy_rest(writer)
            config = self._kv_policy(writer)
            writer.finish(self._manifest(data), config)
        if store is not None:
            store.remove()
        return self._result()

    def _memory(self, walk: DecoderWalk, data: CalibrationData | None) -> MemoryPlan:
        """How to stay below the limit; CapacityError when nothing does."""
        lengths = [len(sequence) for sequence in data.sequences] if data is not None else []
        sizes = self.plan.sizes(self.folder, walk, lengths)
        memory = plan_memory(sizes, base_bytes=resident_bytes(), limit=self.options.max_memory)
        self.progress.info(memory.note)
        if memory.warning is not None:
            self._warn(memory.warning)
        return memory

    def _calibration(self) -> CalibrationData | None:
        method, kv = self.plan.method, self.kv_calibration
        if kv is None and (method is None or not method.needs_calibration):
            return None
        from qdeploy.runtime.tokenizer import Tokenizer

        section = self.recipe.calibration
        trusted = self.options.trust_remote_code
        tokenizer = Tokenizer.load(self.folder.path, trust_remote_code=trusted)

        def own() -> tuple[list[list[int]], str]:
            from qdeploy.calibration.self_model import own_sequences

            instead = "give text with --calib"
            limit = self.options.max_memory
            require_memory("--calib self", 2 * self.folder.num_weights(), limit, instead)
            return own_sequences(self.folder.path, section, tokenizer, self.progress)

        data = load_calibration(section, tokenizer, own)
        for note in data.notes:
            self.progress.info(note)
        moments = self.recipe.method not in ("rtn", "fp8", "none")  # those take maxima at most
        for warning in data.warnings(self.plan.in_features if moments else 0):
            self._warn(warning)
        if kv is not None:
            kv.check(data.sequences)
        return data

    def _quantize(
        self,
        walk: DecoderWalk,
        writer: ArtifactWriter,
        store: ResumeStore,
        data: CalibrationData | None,
        memory: MemoryPlan,
    ) -> None:
        count = len(walk.layers)
        hidden: Sequence[Tensor] = ()
        references: Sequence[Tensor] = ()
        keep: Keep = Spill(store.folder) if memory.spill else list
        runner = LayerRunner(
            walk=walk, plan=self.plan, kv=self.kv_calibration, keep=keep, warn=self._warn
        )
        if data is not None:
            hidden = walk.embed(data.sequences, memory.batch_tokens, keep)
            if 0 < store.finished < count:
                stored = store.load_inputs()
                hidden, references = stored if memory.spill else map(list, stored)
        with self.progress.task(f"quantizing ({self.recipe.method})", count) as task:
            for index in range(count):
                if index < store.finished:
                    schemes = self.plan.local_schemes(walk.layer_name(index))
                    outcome, kv = store.load(index, schemes)
                else:
                    outcome, kv = runner.run(index, hidden, references)
                    store.save(index, outcome, kv)
                    hidden, references = outcome.outputs, outcome.references
                self.kv_statistics += [kv] if kv is not None else []
                self._write(walk.layer_name(index), outcome, writer)
                task.advance(1, walk.layer_name(index))

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
                rows_kept=data.rows_kept,
                rows_blank=data.rows_blank,
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
            created_by=self.created_by,
        )

    def _fingerprint(self, data: CalibrationData | None, memory: MemoryPlan) -> dict[str, str]:
        later = {"model", "quantize_embeddings", "gate", "format"}  # no layer knows
        later |= {"kv_cache"} if self.kv_calibration is None else set()
        kept = self.recipe.model_dump(mode="json", exclude=later)
        return {
            "weights": self.folder.weights_sha256(),
            "recipe": json.dumps(kept, sort_keys=True),
            "calibration": data.sha256 if data is not None else "",
            "forward_dtype": str(forward_dtype()),
            "versions": json.dumps(_versions(), sort_keys=True),
            "batch_tokens": str(memory.batch_tokens) if data is not None else "",
            "cpu": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
            "threads": str(torch.get_num_threads()),
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
            scheme=written.scheme_name or "dense",
            format=self.plan.format,
            kv_cache=self.kv.key,
            embeddings=self.embeddings.key if self.embeddings is not None else None,
            layers=[record.model_dump(mode="json") for record in self.layers],
            seconds=time.monotonic() - self.start,
            peak_rss_bytes=peak_resident_bytes(),
            warnings=self.warnings,
        )


def _record(prefix: str, report: LinearReport, plan: QuantPlan) -> LayerRecord:
    name = f"{prefix}.{report.name}"
    return LayerRecord(**asdict(report) | {"name": name, "scheme": plan.schemes[name].name})


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
