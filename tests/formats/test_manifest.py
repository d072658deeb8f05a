"""qdeploy.json: round trips, versions, records by KV policy."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from qdeploy.errors import FormatError, UsageError
from qdeploy.formats.manifest import (
    AccuracyRecord,
    BaseModelRecord,
    CalibrationRecord,
    EmbeddingsRecord,
    KVCacheRecord,
    KVPolicyRecord,
    LayerRecord,
    Manifest,
    read_manifest,
    write_manifest,
)
from qdeploy.kv.config import KVCacheConfig

INT4 = KVCacheConfig(dtype="int4")
FOUR_BITS = EmbeddingsRecord(bits=4, group_size=64, symmetric=True)


def record(kv: KVCacheConfig = INT4, backend: str = "cpu", **fields: Any) -> AccuracyRecord:
    base: dict[str, Any] = {
        "reference": "org/model",
        "text_sha256": "0" * 64,
        "num_tokens": 2048,
        "ctx_len": 1024,
        "metrics": {"perplexity": 12.5, "kl_mean": 0.03},
        "gate": "kl<0.1",
        "passed": True,
    }
    policy = KVPolicyRecord.of(kv).model_dump()
    return AccuracyRecord(backend=backend, **policy, **(base | fields))


def manifest(**fields: Any) -> Manifest:
    return Manifest(
        base_model=BaseModelRecord(name="org/model", revision="main", sha256="ab" * 32),
        recipe={"method": "awq", "bits": 4},
        **fields,
    )


def test_round_trip(tmp_path: Path) -> None:
    written = manifest(
        calibration=CalibrationRecord(
            source="default", sha256="cd" * 32, samples_used=6, samples_requested=128, tokens=3072
        ),
        layers=[LayerRecord(name="model.layers.0.mlp.up_proj", scheme="W4A16_ASYM", loss=0.01)],
        kv_cache=KVCacheRecord.of(INT4),
        embeddings=FOUR_BITS,
        accuracy=[record(embeddings=FOUR_BITS)],
        files={"model.safetensors": "ef" * 32},
        created_by={"qdeploy": "0.1.0"},
    )
    write_manifest(tmp_path, written)
    assert read_manifest(tmp_path) == written
    assert [path.name for path in tmp_path.iterdir()] == ["qdeploy.json"]
    assert written.kv_cache.config() == INT4


def test_no_manifest_is_none(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) is None


@pytest.mark.parametrize("version", [0, 2, "1", None, True])
def test_unknown_version_says_what_to_do(version: object, tmp_path: Path) -> None:
    data = manifest().model_dump() | {"schema_version": version}
    (tmp_path / "qdeploy.json").write_text(json.dumps(data))
    with pytest.raises(FormatError, match=r"schema_version .* upgrade qdeploy or quantize again"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"base_model": None}, "base_model"),
        ({"layers": [{"scheme": "W4A16"}]}, "layers.0.name"),
        ({"accuracy": [{"dtype": "int4"}]}, "accuracy.0.backend"),
        ({"files": {"../../etc/passwd": "00"}}, "plain file name"),
        ({"files": {"a/b": "00"}}, "plain file name"),
        ({"files": {"..": "00"}}, "plain file name"),
    ],
)
def test_broken_manifest_names_the_key(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    (tmp_path / "qdeploy.json").write_text(json.dumps(manifest().model_dump() | change))
    with pytest.raises(FormatError, match=named) as info:
        read_manifest(tmp_path)
    assert "\n" not in str(info.value)
    assert "qdeploy.json" in str(info.value)


@given(text=st.text(max_size=30) | st.sampled_from(['{"schema_version": 1', "[]", "{}", "null"]))
def test_any_text_is_refused_in_one_line(
    text: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("manifest")
    (folder / "qdeploy.json").write_text(text, encoding="utf-8")
    with pytest.raises(FormatError) as info:
        read_manifest(folder)
    assert "\n" not in str(info.value).replace(text, "")


def test_fields_of_a_later_qdeploy_survive_rewriting(tmp_path: Path) -> None:
    data = manifest().model_dump() | {"speculation": {"method": "ngram"}}
    (tmp_path / "qdeploy.json").write_text(json.dumps(data))
    loaded = read_manifest(tmp_path)
    assert loaded is not None
    write_manifest(tmp_path, loaded.with_record(record()))
    assert json.loads((tmp_path / "qdeploy.json").read_text())["speculation"]["method"] == "ngram"


def test_numbers_that_json_lacks_survive(tmp_path: Path) -> None:
    metrics = {"perplexity": math.inf, "kl_mean": math.nan}
    write_manifest(tmp_path, manifest(accuracy=[record(metrics=metrics, passed=False)]))
    json.loads((tmp_path / "qdeploy.json").read_text(), parse_constant=pytest.fail)
    loaded = read_manifest(tmp_path)
    assert loaded is not None
    assert loaded.accuracy[0].metrics["perplexity"] == math.inf
    assert math.isnan(loaded.accuracy[0].metrics["kl_mean"])


def test_records_are_found_by_kv_policy() -> None:
    int8 = KVCacheConfig(dtype="int8")
    two = manifest().with_record(record(INT4)).with_record(record(int8))
    found = two.records_for(INT4)[-1]
    assert found.key == INT4.key
    assert two.records_for(KVCacheConfig(dtype="int4", block_size=32)) == []
    assert two.records_for(KVCacheConfig(dtype="int4", sink_blocks=0)) == []
    assert two.records_for(KVCacheConfig(dtype="int4", residual_blocks=1)) == []


def test_a_new_record_replaces_its_own_kind_only() -> None:
    start = manifest().with_record(record()).with_record(record(backend="reference"))
    again = start.with_record(record(passed=False))
    assert [(r.backend, r.passed) for r in again.accuracy] == [("reference", True), ("cpu", False)]
    assert len(start.accuracy) == 2
    newest = again.records_for(INT4)[-1]
    assert newest.passed is False
    assert len(start.with_record(record(act="int8")).accuracy) == 3


def test_unknown_kv_policy_is_refused_when_used() -> None:
    with pytest.raises(UsageError, match="int3"):
        manifest(kv_cache=KVCacheRecord(dtype="int3")).kv_cache.config()


def test_manifest_is_immutable() -> None:
    with pytest.raises(ValidationError):
        manifest().recipe = {}  # type: ignore[misc]


def test_records_of_other_embeddings_do_not_count() -> None:
    """P1: what was measured with dense tables says nothing of rounded ones, nor the reverse."""
    dense, rounded = record(), record(embeddings=FOUR_BITS)
    both = manifest().with_record(dense).with_record(rounded)
    assert both.accuracy == [dense, rounded]
    assert both.records_for(INT4) == [dense]
    policy = both.model_copy(update={"embeddings": FOUR_BITS})
    assert policy.records_for(INT4) == [rounded]
    eight = FOUR_BITS.model_copy(update={"bits": 8})
    assert both.model_copy(update={"embeddings": eight}).records_for(INT4) == []


def test_embeddings_round_trip_to_a_scheme() -> None:
    assert EmbeddingsRecord.of(FOUR_BITS.scheme()) == FOUR_BITS
    assert FOUR_BITS.key == "4 bits, groups of 64, symmetric"
