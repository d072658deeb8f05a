"""May this artifact be served with this KV policy? (CONTRACT §2)"""

from __future__ import annotations

from qdeploy.errors import GateError, UsageError
from qdeploy.formats.manifest import AccuracyRecord, Manifest
from qdeploy.kv.config import KVCacheConfig


def check_verified(
    manifest: Manifest | None,
    kv_config: KVCacheConfig,
    backend: str,
    allow_unverified: bool,
    *,
    artifact: str = "ARTIFACT",
) -> list[str]:
    """Warnings to show; empty when the record fits.

    backend: the executor's name, or "auto" while it isn't known: then any record that passed
    will do. Raises UsageError when the accuracy record of this KV policy is missing and GateError
    when it failed its gate, unless allow_unverified.
    """
    if manifest is None:
        return [f"{artifact} has no qdeploy.json: its accuracy with KV {kv_config.key} is unknown"]
    record = _record(manifest, kv_config, backend)
    command = _eval_command(manifest, kv_config, artifact)
    if record is None:
        error: Exception = UsageError(
            f"{artifact} has no accuracy record for KV {kv_config.key}; {command} or serve with "
            "--allow-unverified"
        )
    elif record.passed is False:
        error = GateError(
            f"{artifact} failed its accuracy gate ({record.gate}) with KV {kv_config.key}; "
            f"quantize with more bits, or {command}, or serve with --allow-unverified"
        )
    else:
        return _remarks(record, backend, artifact)
    if not allow_unverified:
        raise error
    return [f"{str(error).split('; ')[0]}; served because of --allow-unverified"]


def _record(manifest: Manifest, kv: KVCacheConfig, backend: str) -> AccuracyRecord | None:
    """The newest record of the backend, else of any; for "auto" one that passed if there is."""
    matching = manifest.records_for(kv)
    if backend == "auto":
        preferred = [record for record in matching if record.passed is not False]
    else:
        preferred = [record for record in matching if record.backend == backend]
    found = preferred or matching
    return found[-1] if found else None


def _eval_command(manifest: Manifest, kv: KVCacheConfig, artifact: str) -> str:
    """How to get the record: `eval` measures the artifact's own block sizes only."""
    own = manifest.kv_cache
    if (own.block_size, own.sink_blocks, own.residual_blocks) != (
        kv.block_size,
        kv.sink_blocks,
        kv.residual_blocks,
    ):
        return f"serve with the artifact's own --block-size {own.block_size}"
    return f"run `qdeploy eval {artifact} --kv-cache-dtype {kv.dtype}`"


def _remarks(record: AccuracyRecord, backend: str, artifact: str) -> list[str]:
    remarks = []
    if record.passed is None:
        remarks.append(f"accuracy of {artifact} was measured, but against no gate")
    if backend not in ("auto", record.backend):
        remarks.append(
            f"accuracy of {artifact} was measured on the {record.backend} backend, this is "
            f"{backend}; `qdeploy eval {artifact} --backend {backend}` measures it here"
        )
    return remarks
