"""KV policies of single layers: recipe → artifact → accuracy records → serving."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qdeploy.errors import UsageError
from qdeploy.evaluation.evaluate import evaluate
from qdeploy.evaluation.gate import parse_gate
from qdeploy.evaluation.records import write_records
from qdeploy.evaluation.text import EvalText
from qdeploy.formats.manifest import KVCacheRecord, read_manifest
from qdeploy.kv.config import KVCacheConfig, LayerPolicy
from qdeploy.pipeline import quantize_checkpoint
from qdeploy.recipes import load_recipe, parse_recipe
from qdeploy.runtime.llm import LLM, resolve_kv_config
from qdeploy.server.verify import check_verified
from tiny_models import tiny_checkpoint

YAML = """
method: none
kv_cache: {dtype: int4, block_size: 16, layers: {0: int8, 2: {dtype: bf16, sink_blocks: 2}}}
"""
POLICY = KVCacheConfig(
    dtype="int4",
    block_size=16,
    layers=(
        LayerPolicy(layer=0, dtype="int8", sink_blocks=1, residual_blocks=0),
        LayerPolicy(layer=2, dtype="bf16", sink_blocks=2, residual_blocks=0),
    ),
)
KEY = "int4/b16/s1/r0+0=int8/s1/r0+2=bf16/s2/r0"


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layers")
    (folder / "layers.yaml").write_text(YAML)
    recipe = load_recipe(str(folder / "layers.yaml"))
    base = tiny_checkpoint("llama", folder / "base")
    result = quantize_checkpoint(str(base), folder / "out", recipe)
    assert result.kv_cache == KEY
    return result.output


def test_a_recipe_names_layers_in_two_ways() -> None:
    written = parse_recipe({"kv_cache": {"dtype": "int4", "layers": {1: "bf16"}}}, "test")
    longer = {1: {"dtype": "bf16", "residual_blocks": 0}}
    assert (
        parse_recipe({"kv_cache": {"dtype": "int4", "layers": longer}}, "test").kv_cache.config()
        == written.kv_cache.config()
    )
    again = parse_recipe(json.loads(written.model_dump_json()), "JSON's keys are text")
    assert again.kv_cache.config() == written.kv_cache.config()


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ("{0: int3}", r"kv_cache\.layers\.0\.dtype.*'bf16'"),
        ("{0: {bits: 4}}", r"kv_cache\.layers\.0\.bits"),
        ("{first: int8}", r"kv_cache\.layers\.first"),
        ("[int8]", r"kv_cache\.layers.*dictionary"),
        ("{0: int8, 0: bf16}", r"0 is given twice in the mapping at line 2"),
    ],
)
def test_a_bad_layer_in_a_recipe_is_one_line(layers: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(f"method: none\nkv_cache: {{dtype: int4, layers: {layers}}}\n")
    with pytest.raises(UsageError, match=message) as info:
        load_recipe(str(path))
    assert "\n" not in str(info.value)


def test_a_layer_that_the_model_has_not_got_fails_before_the_work(tmp_path: Path) -> None:
    base = tiny_checkpoint("llama", tmp_path / "base")
    recipe = parse_recipe({"method": "rtn", "kv_cache": {"layers": {3: "int8"}}}, "test")
    with pytest.raises(UsageError, match=r"layer 3 .* 3 layers"):
        quantize_checkpoint(str(base), tmp_path / "out", recipe)
    assert not (tmp_path / "out").exists()


def test_the_manifest_keeps_every_layer(artifact: Path) -> None:
    manifest = read_manifest(artifact)
    assert manifest is not None
    assert manifest.kv_cache.config() == POLICY
    assert manifest.kv_cache.key == POLICY.key == KEY
    assert KVCacheRecord.of(POLICY) == manifest.kv_cache
    stored = json.loads((artifact / "qdeploy.json").read_text())["kv_cache"]["layers"]
    assert stored[1] == {"layer": 2, "dtype": "bf16", "sink_blocks": 2, "residual_blocks": 0}
    assert "layer 0: int8; layer 2: bf16" in (artifact / "README.md").read_text()
    # A token's K and V: 2 heads of 16, a scale and a minimum per channel of K and per token of V.
    elements, scales = 2 * 2 * 16, 2 * (16 * 4 / 16 + 4)
    per_token = (elements + scales) + (elements / 2 + scales) + 2 * elements
    assert manifest.capacity.kv_bytes_per_token == per_token


def test_auto_is_the_artifacts_policy_and_a_format_is_all_layers(artifact: Path) -> None:
    assert resolve_kv_config(artifact, "auto") == POLICY
    assert resolve_kv_config(artifact, "int4") == KVCacheConfig(dtype="int4", block_size=16)
    llm = LLM(artifact, max_model_len=128)
    assert llm.engine.executor.kv_config == POLICY
    assert len(llm.engine.executor.kv_groups) == 3


def test_p1_the_record_is_of_this_policy_and_no_other(artifact: Path) -> None:
    text = EvalText(
        windows=[[7 * t % 250 for t in range(70)]],
        sha256="",
        source="test",
        ctx_len=70,
        stride=70,
        bos=False,
    )
    plain = POLICY.with_dtype("int4")
    with pytest.raises(UsageError, match=r"KV int4/b16/s1/r0\+0=.*--kv-cache-dtype auto"):
        check_verified(read_manifest(artifact), POLICY, "auto", allow_unverified=False)
    results = evaluate(artifact, artifact, [POLICY], text, parse_gate("kl<9"))
    assert results[0].metrics["kl_mean"] > 0
    write_records(artifact, results)
    manifest = read_manifest(artifact)
    assert manifest is not None
    assert [record.key for record in manifest.accuracy] == [KEY]
    assert not check_verified(manifest, POLICY, "auto", allow_unverified=False)
    with pytest.raises(UsageError, match=r"KV int4/b16/s1/r0; .*--kv-cache-dtype int4"):
        check_verified(manifest, plain, "auto", allow_unverified=False)
