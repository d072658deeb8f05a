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

    backend: the executor's name. Raises UsageError when the accuracy record of this KV policy is
    missing and GateError when it failed its gate, unless allow_unverified.
    """
    if manifest is None:
        return [f"{artifact} has no qdeploy.json: its accuracy with KV {kv_config.key} is unknown"]
    record = _record(manifest, kv_config)
    command = f"qdeploy eval {artifact} --kv-cache-dtype {kv_config.dtype}"
    if record is None:
        message = f"{artifact} has no accuracy record for KV {kv_config.key}"
        if not allow_unverified:
            raise UsageError(f"{message}; run `{command}` or serve with --allow-unverified")
        return [f"{message}; served because of --allow-unverified"]
    if not record.passed:
        message = f"{artifact} failed its accuracy gate ({record.gate}) with KV {kv_config.key}"
        if not allow_unverified:
            raise GateError(
                f"{message}; quantize with more bits or measure again with `{command}`, or serve "
                "with --allow-unverified"
            )
        return [f"{message}; served because of --allow-unverified"]
    if record.backend != backend:
        return [
            f"accuracy of {artifact} was measured on the {record.backend} backend, "
            f"this is {backend}; to measure it here run `{command} --backend {backend}`"
        ]
    return []


def _record(manifest: Manifest, kv: KVCacheConfig) -> AccuracyRecord | None:
    wanted = (kv.dtype, kv.block_size, kv.sink_blocks, kv.residual_blocks)
    for record in manifest.accuracy:
        found = (record.dtype, record.block_size, record.sink_blocks, record.residual_blocks)
        if found == wanted:
            return record
    return None
