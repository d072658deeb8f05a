"""Which artifacts `serve` opens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qdeploy.errors import GateError, UsageError
from qdeploy.formats.manifest import (
    AccuracyRecord,
    BaseModelRecord,
    EmbeddingsRecord,
    KVCacheRecord,
    Manifest,
)
from qdeploy.kv.config import KVCacheConfig
from qdeploy.server.verify import check_verified

INT4 = KVCacheConfig(dtype="int4")


def record(
    passed: bool | None, *, backend: str = "reference", act: str = "fp32", dtype: str = "int4"
) -> AccuracyRecord:
    return AccuracyRecord(
        dtype=dtype,
        backend=backend,
        act=act,
        reference="base",
        text_sha256="0",
        num_tokens=1,
        ctx_len=1,
        metrics={},
        gate="kl<0.05",
        passed=passed,
    )


def manifest(*records: AccuracyRecord) -> Manifest:
    return Manifest(
        base_model=BaseModelRecord(name="base"),
        recipe={},
        kv_cache=KVCacheRecord(dtype="int4"),
        accuracy=list(records),
    )


def test_a_passed_record_is_enough() -> None:
    assert check_verified(manifest(record(True)), INT4, "reference", False) == []
    assert check_verified(manifest(record(True)), INT4, "auto", False) == []


def test_a_missing_record_is_refused_with_the_command() -> None:
    for found in (manifest(), manifest(record(True, dtype="bf16"))):
        with pytest.raises(UsageError, match=r"qdeploy eval OUT --kv-cache-dtype int4") as error:
            check_verified(found, INT4, "reference", False, artifact="OUT")
        assert "int4/b64/s1/r0" in str(error.value)
        assert error.value.exit_code == 2


def test_a_failed_gate_is_refused() -> None:
    with pytest.raises(GateError, match=r"kl<0\.05") as error:
        check_verified(manifest(record(False)), INT4, "reference", False)
    assert error.value.exit_code == 1


@pytest.mark.parametrize("found", [manifest(), manifest(record(False))])
def test_allow_unverified_opens_with_a_warning(found: Manifest) -> None:
    (warning,) = check_verified(found, INT4, "reference", True)
    assert "--allow-unverified" in warning


def test_a_record_of_another_block_size_is_none() -> None:
    with pytest.raises(UsageError, match="--block-size 64"):
        check_verified(manifest(record(True)), replace(INT4, block_size=32), "reference", False)


def test_another_backend_is_a_warning() -> None:
    (warning,) = check_verified(manifest(record(True)), INT4, "cpu", False)
    assert "reference" in warning
    assert "--backend cpu" in warning


def test_the_record_of_the_backend_counts() -> None:
    mixed = manifest(record(True), record(False, backend="cpu"))
    assert check_verified(mixed, INT4, "reference", False) == []
    assert check_verified(mixed, INT4, "auto", False) == []
    with pytest.raises(GateError):
        check_verified(mixed, INT4, "cpu", False)


def test_a_record_of_other_embeddings_is_no_record() -> None:
    policy = EmbeddingsRecord(bits=4, group_size=64, symmetric=True)
    found = manifest(record(True)).model_copy(update={"embeddings": policy})
    with pytest.raises(UsageError, match="no accuracy record"):
        check_verified(found, INT4, "reference", False)
    measured = record(True).model_copy(update={"embeddings": policy})
    assert check_verified(found.with_record(measured), INT4, "reference", False) == []


def test_another_activation_mode_is_a_warning() -> None:
    found = manifest(record(True, backend="cpu", act="int8"))
    assert check_verified(found, INT4, "cpu", False, act="int8") == []
    (warning,) = check_verified(found, INT4, "cpu", False, act="fp32")
    assert "int8 activations" in warning
    assert "--backend cpu --act fp32" in warning


def test_the_record_of_the_activation_mode_counts_then_the_backends_then_the_newest() -> None:
    records = [
        record(True, backend="cpu", act="fp32"),
        record(False, backend="cpu", act="int8"),
        record(True),
    ]
    assert check_verified(manifest(*records), INT4, "cpu", False, act="fp32") == []
    with pytest.raises(GateError):
        check_verified(manifest(*records), INT4, "cpu", False, act="int8")
    with pytest.raises(GateError):
        check_verified(manifest(*records[1:]), INT4, "cpu", False, act="fp32")
    (warning,) = check_verified(manifest(*records), INT4, "triton", False, act="fp32")
    assert "reference backend" in warning


def test_foreign_checkpoints_get_a_notice() -> None:
    (notice,) = check_verified(None, INT4, "reference", False, artifact="MODEL")
    assert "MODEL" in notice
