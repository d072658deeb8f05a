"""`qdeploy.json`: what an artifact is, how it was made, and how accurate it measured."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from qdeploy.errors import FormatError, UsageError
from qdeploy.formats.safetensors_header import read_json
from qdeploy.kv.config import KVCacheConfig, LayerPolicy, layers_key
from qdeploy.quantization.scheme import TABLE_BITS, TABLE_GROUP_SIZES, Bits, QuantScheme

if TYPE_CHECKING:
    from typing_extensions import Self

    from qdeploy.kv.auto import KVLayerStats

MANIFEST_NAME = "qdeploy.json"
SCHEMA_VERSION: Final = 1


class _Record(BaseModel):
    # A newer qdeploy of the same schema version may add fields; rewriting keeps them.
    # JSON has no NaN or infinity: a broken model's perplexity is written as the string "NaN".
    model_config = ConfigDict(frozen=True, extra="allow", ser_json_inf_nan="strings")


class BaseModelRecord(_Record):
    """The unquantized model; `sha256` is over its weights (TensorFolder.weights_sha256)."""

    name: str
    revision: str | None = None
    sha256: str | None = None


class CalibrationRecord(_Record):
    """The text that calibrated, and how much of what was asked for it gave.

    rows_kept, rows_blank: of a source of rows (.jsonl, data set), None of others
    """

    source: str
    sha256: str
    samples_used: int
    samples_requested: int
    tokens: int
    rows_kept: int | None = None
    rows_blank: int | None = None


class LayerRecord(_Record):
    """One quantized linear layer, by its module name; `loss` in the method's own measure."""

    name: str
    scheme: str
    loss: float | None = None
    dampening: float | None = None
    fallback: str | None = None
    seconds: float | None = None


class LayerPolicyRecord(_Record):
    """The KV policy of one layer, in place of the model's."""

    layer: int
    dtype: str
    sink_blocks: int
    residual_blocks: int

    def policy(self) -> LayerPolicy:
        """The runtime's value."""
        return LayerPolicy(
            layer=self.layer,
            dtype=self.dtype,
            sink_blocks=self.sink_blocks,
            residual_blocks=self.residual_blocks,
        )


class KVPolicyRecord(_Record):
    """A KV-cache policy."""

    dtype: str = "bf16"
    block_size: int = 64
    sink_blocks: int = 1
    residual_blocks: int = 0
    layers: tuple[LayerPolicyRecord, ...] = ()

    @property
    def key(self) -> str:
        """KVCacheConfig.key of the policy; doesn't raise for one that is unknown here."""
        own = f"{self.dtype}/b{self.block_size}/s{self.sink_blocks}/r{self.residual_blocks}"
        return own + layers_key([record.policy() for record in self.layers])

    def config(self) -> KVCacheConfig:
        """The runtime's value; raises UsageError for a policy that it doesn't know."""
        return KVCacheConfig(
            dtype=self.dtype,
            block_size=self.block_size,
            sink_blocks=self.sink_blocks,
            residual_blocks=self.residual_blocks,
            layers=tuple(record.policy() for record in self.layers),
        )

    @classmethod
    def of(cls, config: KVCacheConfig) -> Self:
        """The record of a runtime policy."""
        return cls.model_validate(asdict(config))


class KVLayerRecord(_Record):
    """What calibration saw of one layer's K and V.

    k_scale, v_scale: static float8 scales, amax / 448, of engines that want them; k_amax, v_amax:
    largest magnitude of each KV head. k_spread: widest range of a key channel over the median.
    errors: relative error of attention outputs under each policy tried, by its key, over `tried`
    queries; empty where none was.
    """

    layer: int
    tokens: int
    k_scale: float
    v_scale: float
    k_amax: tuple[float, ...]
    v_amax: tuple[float, ...]
    k_spread: float
    errors: dict[str, float] = Field(default_factory=dict)
    tried: int = 0

    @classmethod
    def of(cls, stats: KVLayerStats) -> KVLayerRecord:
        """The record of calibration's value."""
        return cls(k_scale=stats.k_scale, v_scale=stats.v_scale, **asdict(stats))


class KVCacheRecord(KVPolicyRecord):
    """The KV-cache policy that the artifact is meant to be served with; statistics: of every layer,
    where calibration took them.
    """

    statistics: tuple[KVLayerRecord, ...] = ()

    def with_statistics(self, statistics: Sequence[KVLayerStats]) -> KVCacheRecord:
        """A copy with them."""
        records = tuple(KVLayerRecord.of(stats) for stats in statistics)
        return self.model_copy(update={"statistics": records})


class EmbeddingsRecord(_Record):
    """How embedding and head are rounded when the artifact is loaded; its files keep them dense."""

    bits: int
    group_size: int
    symmetric: bool

    @property
    def key(self) -> str:
        """Names the policy in messages, e.g. `4 bits, groups of 64, symmetric`."""
        kind = "symmetric" if self.symmetric else "asymmetric"
        return f"{self.bits} bits, groups of {self.group_size}, {kind}"

    def scheme(self) -> QuantScheme:
        """The rounding's value; raises UsageError for one that this version doesn't know."""
        if self.bits not in TABLE_BITS or self.group_size not in TABLE_GROUP_SIZES:
            raise UsageError(f"embeddings of {self.key} aren't known to this qdeploy; upgrade it")
        return QuantScheme(
            bits=cast("Bits", self.bits), group_size=self.group_size, symmetric=self.symmetric
        )

    @classmethod
    def of(cls, scheme: QuantScheme) -> EmbeddingsRecord:
        """The record of a scheme."""
        return cls(bits=scheme.bits, group_size=scheme.group_size, symmetric=scheme.symmetric)


class AccuracyRecord(KVPolicyRecord):
    """One evaluation: under one KV policy, by one backend, on one text.

    embeddings: how the model that was measured had them, None for dense.
    """

    backend: str
    embeddings: EmbeddingsRecord | None = None
    act: str = "fp32"
    reference: str
    text_sha256: str
    num_tokens: int
    ctx_len: int
    metrics: dict[str, float]
    gate: str | None = None
    passed: bool | None = None


class CapacityRecord(_Record):
    """What serving needs: stored bytes of all weights, and of one token's K and V."""

    weight_bytes: int | None = None
    kv_bytes_per_token: float | None = None


class ExportRecord(_Record):
    """What `export` converted: the source's name, weight format and weights."""

    source: str
    format: str
    sha256: str


class Manifest(_Record):
    """The whole of `qdeploy.json` (CONTRACT §2). Immutable: `with_record` gives a new one."""

    schema_version: Literal[1] = SCHEMA_VERSION
    base_model: BaseModelRecord
    recipe: dict[str, Any]
    calibration: CalibrationRecord | None = None
    layers: list[LayerRecord] = Field(default_factory=list)
    kv_cache: KVCacheRecord = KVCacheRecord()
    embeddings: EmbeddingsRecord | None = None
    accuracy: list[AccuracyRecord] = Field(default_factory=list)
    capacity: CapacityRecord = CapacityRecord()
    exported: ExportRecord | None = None
    files: dict[str, str] = Field(default_factory=dict)
    created_by: dict[str, str] = Field(default_factory=dict)

    @field_validator("files")
    @classmethod
    def _plain_names(cls, files: dict[str, str]) -> dict[str, str]:
        for name in files:
            if name in ("", ".", "..") or Path(name).name != name or "\\" in name:
                raise ValueError(f"{name!r} is not a plain file name")
        return files

    def records_for(self, config: KVCacheConfig) -> list[AccuracyRecord]:
        """The records of the KV policy and this embeddings policy, whatever their backend; the
        newest last.
        """
        return [
            record
            for record in self.accuracy
            if record.key == config.key and record.embeddings == self.embeddings
        ]

    def with_record(self, record: AccuracyRecord) -> Manifest:
        """A copy with `record` last, in place of one of the same policies, backend and act."""
        kept = [item for item in self.accuracy if _identity(item) != _identity(record)]
        return self.model_copy(update={"accuracy": [*kept, record]})


def _identity(record: AccuracyRecord) -> tuple[str, str, str, EmbeddingsRecord | None]:
    return (record.key, record.backend, record.act, record.embeddings)


def read_manifest(folder: Path) -> Manifest | None:
    """The folder's manifest, None when it has none; FormatError when it's broken or too new."""
    path = Path(folder) / MANIFEST_NAME
    if not path.is_file():
        return None
    data = read_json(path)
    version = data.get("schema_version")
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise FormatError(
            f"{path}: schema_version {version!r} is not known to this qdeploy, which reads "
            f"{SCHEMA_VERSION}; upgrade qdeploy or quantize again"
        )
    try:
        return Manifest.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise FormatError(f"{path}: {key}: {first['msg']}; quantize again") from None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `qdeploy.json` atomically, and bring the model card's accuracy table up to date."""
    from qdeploy.formats.model_card import refresh_card

    text = manifest.model_dump_json(indent=2)
    write_atomic(Path(folder) / MANIFEST_NAME, text + "\n")
    refresh_card(Path(folder), manifest)


def write_atomic(path: Path, text: str) -> None:
    """Write through a temporary sibling, so that a reader sees the old file or the new one."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
