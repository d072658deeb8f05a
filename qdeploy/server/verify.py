"""May this artifact be served with this KV policy? (CONTRACT §2)"""

from __future__ import annotations

from qdeploy.errors import GateError, UsageError
from qdeploy.formats.manifest import AccuracyRecord, Manifest
from qdeploy.kv.config import KVCacheConfig
from qdeploy.runtime.executors import ACT_MODES


def check_verified(
    manifest: Manifest | None,
    kv_config: KVCacheConfig,
    backend: str,
    allow_unverified: bool,
    *,
    act: str = "fp32",
    artifact: str = "ARTIFACT",
) -> list[str]:
    """Warnings to show; empty when the record fits.

    backend, act: the executor's; backend "auto" while it isn't known: then any record that passed
    will do. Raises UsageError when the accuracy record of this KV policy is missing and GateError
    when it failed its gate, unless allow_unverified.
    """
    if manifest is None:
        return [f"{artifact} has no qdeploy.json: its accuracy with KV {kv_config.key} is unknown"]
    record = _record(manifest, kv_config, backend, act)
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
        return _remarks(record, backend, act, artifact)
    if not allow_unverified:
        raise error
    return [f"{str(error).split('; ')[0]}; served because of --allow-unverified"]


def _record(manifest: Manifest, kv: KVCacheConfig, backend: str, act: str) -> AccuracyRecord | None:
    """The newest record of the backend and activation mode, else of the backend, else of any; for
    "auto" one that passed if there is.
    """

    def fit(record: AccuracyRecord) -> int:
        if backend == "auto":
            return int(record.passed is not False)
        return (record.backend == backend) * (1 + (record.act == act))

    newest_first = reversed(manifest.records_for(kv))
    return max(newest_first, key=fit, default=None)


def _eval_command(manifest: Manifest, kv: KVCacheConfig, artifact: str) -> str:
    """How to get the record: `eval` measures the artifact's own block sizes only."""
    own = manifest.kv_cache
    if (own.block_size, own.sink_blocks, own.residual_blocks) != (
        kv.block_size,
        kv.sink_blocks,
        kv.residual_blocks,
    ):
        return f"serve with the artifact's own --block-size {own.block_size}"
    dtype = "auto" if kv.layers else kv.dtype
    return f"run `qdeploy eval {artifact} --kv-cache-dtype {dtype}`"


def _remarks(record: AccuracyRecord, backend: str, act: str, artifact: str) -> list[str]:
    remarks = []
    if record.passed is None:
        remarks.append(f"accuracy of {artifact} was measured, but against no gate")
    if backend != "auto" and (record.backend, record.act) != (backend, act):
        option = f" --act {act}" if act in ACT_MODES else ""  # others are a backend's own
        remarks.append(
            f"accuracy of {artifact} was measured on the {record.backend} backend with "
            f"{record.act} activations, this is {backend} with {act}; `qdeploy eval {artifact} "
            f"--backend {backend}{option}` measures it here"
        )
    return remarks
