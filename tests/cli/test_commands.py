"""The commands end to end on a tiny model, through the console script's entry point."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from qdeploy.cli import app
from qdeploy.formats.hf import open_folder
from tiny_models import tiny_checkpoint

runner = CliRunner()


def qdeploy(*args: object) -> Result:
    return runner.invoke(app, [str(arg) for arg in args])


def result_json(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    data: dict[str, Any] = json.loads(result.stdout)
    return data


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("base") / "tiny")


@pytest.fixture(scope="module")
def calib(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("calib") / "text.txt"
    path.write_text("The quick brown fox jumps over the lazy dog. " * 200)
    return path


def quantized(base: Path, calib: Path, out: Path, *extra: object) -> dict[str, Any]:
    if "rtn" not in extra:
        extra += ("--calib", calib, "--calib-samples", 4, "--calib-seqlen", 64)
    return result_json(qdeploy("quantize", base, "-o", out, "--group-size", 32, "--json", *extra))


def test_quantize_inspect_eval(base: Path, calib: Path, tmp_path: Path) -> None:
    out = tmp_path / "artifact"
    report = quantized(
        base, calib, out, "--method", "rtn", "--kv-cache-dtype", "int8", "--gate", "kl<100"
    )
    assert report["format"] == "compressed-tensors"
    assert {item["kv_cache_dtype"] for item in report["accuracy"]} == {"int8", "bf16"}
    assert (out / "qdeploy.json").is_file()
    inspection = result_json(qdeploy("inspect", out, "--verify", "--json"))
    assert inspection["manifest"]["kv_cache"]["dtype"] == "int8"
    evaluation = result_json(
        qdeploy(
            "eval", out, "--ctx-len", 64, "--kv-cache-dtype", "int4", "--gate", "kl<100", "--json"
        )
    )
    assert evaluation["kv_cache_dtype"] == "int4"
    assert evaluation["metrics"]["kl_mean"] > 0
    records = json.loads((out / "qdeploy.json").read_text())["accuracy"]
    assert {record["dtype"] for record in records} == {"int8", "bf16", "int4"}


@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_embeddings_are_measured_shown_and_kept_out_of_the_files(
    bits: int, base: Path, calib: Path, tmp_path: Path
) -> None:
    dense, out = tmp_path / "dense", tmp_path / "artifact"
    options = ("--method", "rtn", "--gate", "kl<100", "--kv-cache-dtype", "fp8")
    plain = quantized(base, calib, dense, *options)
    report = quantized(base, calib, out, *options, "--quantize-embeddings", bits)
    policy = f"{bits} bits, groups of 64, symmetric"
    assert (plain["embeddings"], report["embeddings"]) == (None, policy)
    assert report["size_bytes"] == plain["size_bytes"]
    # embedding and head, float32 in the files, then codes and a float16 scale per row
    rows, hidden = 288, 64
    saved = 2 * rows * (hidden * 4 - hidden * bits // 8 - 2)
    assert plain["loaded_bytes"] - report["loaded_bytes"] == saved
    assert {item["embeddings"] for item in report["accuracy"]} == {policy}
    assert {item["kv_cache_dtype"] for item in report["accuracy"]} == {"fp8", "bf16"}
    assert report["accuracy"][0]["metrics"] != plain["accuracy"][0]["metrics"]
    inspection = result_json(qdeploy("inspect", out, "--verify", "--json"))
    record = {"bits": bits, "group_size": 64, "symmetric": True}
    assert inspection["manifest"]["embeddings"] == record
    assert all(item["embeddings"] == record for item in inspection["manifest"]["accuracy"])
    assert inspection["loaded_bytes"] == report["loaded_bytes"]
    assert policy in qdeploy("inspect", out).output
    assert policy in (out / "README.md").read_text()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert open_folder(out).tensor(name).equal(open_folder(base).tensor(name))


@pytest.mark.parametrize("dtype", ["fp8", "auto"])
def test_a16_kv_is_calibrated_and_measured_beside_bf16(
    dtype: str, base: Path, calib: Path, tmp_path: Path
) -> None:
    """Also with a method that calibrates nothing itself."""
    out, options = tmp_path / "artifact", ("--calib", calib, "--calib-samples", 4)
    result = qdeploy(
        *("quantize", base, "-o", out, "--method", "none", "--kv-cache-dtype", dtype),
        *("--gate", "kl<100", "--calib-seqlen", 400, "--json", *options),
    )
    report = result_json(result)
    measured = {item["kv_cache_dtype"]: item["metrics"] for item in report["accuracy"]}
    chosen = report["kv_cache"].split("/")[0]
    assert set(measured) == {chosen, "bf16"}
    assert chosen == dtype or dtype == "auto"
    assert all(item["perplexity"] > 1 for item in measured.values())
    assert measured[chosen]["kl_mean"] > measured["bf16"]["kl_mean"]
    found = json.loads((out / "qdeploy.json").read_text())["kv_cache"]["statistics"]
    assert len({record[name] for record in found for name in ("k_scale", "v_scale")}) == 6
    assert all(bool(record["errors"]) == (dtype == "auto") for record in found)
    shown = qdeploy("inspect", out).output
    assert ("changes attention by" in shown) == (dtype == "auto")
    assert result_json(qdeploy("eval", out, "--ctx-len", 64, "--gate", "kl<100", "--json"))


def test_q20_failed_gate_is_exit_1_and_recorded(base: Path, calib: Path, tmp_path: Path) -> None:
    out = tmp_path / "artifact"
    result = qdeploy(
        "quantize", base, "-o", out, "--method", "rtn", "--group-size", 32, "--gate", "kl<0"
    )
    assert result.exit_code == 1
    assert "failed its accuracy gate" in result.output
    records = json.loads((out / "qdeploy.json").read_text())["accuracy"]
    assert records
    assert not any(record["passed"] for record in records)


def test_q18_options_reach_the_artifact(base: Path, calib: Path, tmp_path: Path) -> None:
    configs = []
    for group_size in (16, 32):
        out = tmp_path / f"g{group_size}"
        options = ("--method", "rtn", "--eval", "none", "--format", "awq")
        quantized(base, calib, out, *options, "--group-size", group_size)
        configs.append(json.loads((out / "config.json").read_text())["quantization_config"])
    assert [config["group_size"] for config in configs] == [16, 32]


def test_q18_overrides_and_export_reach_the_files(base: Path, calib: Path, tmp_path: Path) -> None:
    """Mixed precision from a recipe, then 4 bits converted; the accuracy record is carried."""
    recipe = tmp_path / "mixed.yaml"
    recipe.write_text("method: rtn\noverrides: {'*.down_proj': {bits: 8}}\n")
    mixed = tmp_path / "mixed"
    report = result_json(
        qdeploy(
            *("quantize", base, "-o", mixed, "--recipe", recipe, "--group-size", 32),
            *("--gate", "kl<100", "--json"),
        )
    )
    assert report["scheme"] == "W4A16_ASYM + W8A16_ASYM"
    assert report["accuracy"]
    refused = qdeploy("export", mixed, "-o", tmp_path / "awq", "--format", "awq")
    assert refused.exit_code == 2
    assert "use --format compressed-tensors" in " ".join(refused.output.split())
    plain, out = tmp_path / "plain", tmp_path / "out"
    quantized(base, calib, plain, "--method", "rtn", "--gate", "kl<100")
    options = ("--format", "gptq_v2", "--max-shard-size", "40KB", "--json")
    exported = result_json(qdeploy("export", plain, "-o", out, *options))
    assert (exported["lossless"], exported["format"]) == (True, "gptq_v2")
    assert exported["accuracy_records"] == 1
    assert len(list(out.glob("model-*.safetensors"))) > 1
    inspection = result_json(qdeploy("inspect", out, "--verify", "--json"))
    assert (inspection["format"], inspection["findings"]) == ("gptq_v2", [])
    records = json.loads((plain / "qdeploy.json").read_text())["accuracy"]
    assert inspection["manifest"]["accuracy"] == records


def test_a09_shards_hold_every_tensor_once(base: Path, calib: Path, tmp_path: Path) -> None:
    whole, sharded = tmp_path / "whole", tmp_path / "sharded"
    for out, extra in ((whole, ()), (sharded, ("--max-shard-size", "40KB"))):
        quantized(base, calib, out, "--method", "rtn", "--eval", "none", *extra)
    weight_map = json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(weight_map.values())) > 1
    assert open_folder(sharded).weights_sha256() == open_folder(whole).weights_sha256()


def test_flags_override_a_recipe(base: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"model: {base}\nmethod: gptq\nbits: 8\nsymmetric: true\ngroup_size: 16\n")
    out = tmp_path / "out"
    options = ("--method", "rtn", "--bits", "4", "--eval", "none", "--json")
    report = result_json(qdeploy("quantize", "--recipe", recipe, "-o", out, *options))
    assert report["scheme"] == "W4A16"
    written = json.loads((out / "qdeploy.json").read_text())["recipe"]
    assert (written["method"], written["bits"], written["group_size"]) == ("rtn", 4, 16)


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("quantize", "-o", "x"), "MODEL"),
        (("quantize", "nowhere", "-o", "x"), "nowhere"),
        (("quantize", "m", "-o", "x", "--method", "magic"), "method"),
        (("quantize", "m", "-o", "x", "--group-size", "many"), "group_size"),
        (("quantize", "m", "-o", "x", "--recipe", "nope"), "nope"),
        (("quantize", "m", "-o", "x", "--eval", "slow"), "slow"),
        (("quantize", "m", "-o", "x", "--quantize-embeddings", "3"), "quantize_embeddings"),
        (("quantize", "m", "-o", "x", "--method", "none", "--bits", "3"), "--bits"),
        (("quantize", "m", "-o", "x", "--method", "none", "--group-size", "32"), "--group-size"),
        (
            ("quantize", "m", "-o", "x", "--method", "rtn", "--calib-samples", "9"),
            "--calib-samples",
        ),
        (("quantize", "m", "-o", "x", "--method", "rtn", "--seed", "1"), "--seed"),
        (("quantize", "m", "-o", "x", "--gate", "kl=1"), "kl=1"),
        (("eval", "nowhere"), "nowhere"),
        (("inspect", "nowhere"), "nowhere"),
        (("serve", "nowhere", "--port", "0"), "nowhere"),
        (("serve", "nowhere", "--kv-cache-memory", "lots"), "lots"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(args: tuple[str, ...], named: str) -> None:
    result = qdeploy(*args)
    assert result.exit_code == 2
    assert named in result.stderr
    assert "Traceback" not in result.output
    assert len([line for line in result.stderr.splitlines() if line.startswith("error:")]) == 1
    assert not Path("x").exists()


def test_kv_policy_that_cannot_be_fails_before_the_work(base: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "odd.yaml"
    recipe.write_text(f"model: {base}\nmethod: rtn\nkv_cache: {{dtype: int4, block_size: 100}}\n")
    result = qdeploy("quantize", "--recipe", recipe, "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert "block_size=100" in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["odd.yaml"]


def test_a_record_that_cannot_be_kept_is_said(
    base: Path, calib: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "artifact"
    report = quantized(base, calib, out, "--method", "rtn", "--eval", "none")
    assert report["kv_cache"] == "bf16/b64/s1/r0"
    capacity = json.loads((out / "qdeploy.json").read_text())["capacity"]
    assert capacity["kv_bytes_per_token"] == 3 * 2 * 2 * 16 * 2  # layers, K and V, heads, size

    def read_only(*args: object) -> None:
        raise PermissionError(13, "Permission denied", str(out / "qdeploy.json"))

    monkeypatch.setattr("qdeploy.evaluation.records.write_manifest", read_only)
    options = ("eval", out, "--ctx-len", 64, "--gate", "kl<100")
    lenient, strict = qdeploy(*options), qdeploy(*options, "--write")
    assert lenient.exit_code == 0, lenient.output
    assert "the record isn't kept" in " ".join(lenient.stderr.split())
    assert strict.exit_code == 2
    assert "Permission denied; check" in strict.stderr
    foreign = qdeploy("eval", base, "--reference", base, "--write")
    assert foreign.exit_code == 2
    assert "no qdeploy.json to write to" in foreign.stderr


def test_p4_the_backend_is_named_with_its_reason_unless_quiet(base: Path) -> None:
    options = ("eval", base, "--reference", base, "--ctx-len", 64)
    shown = " ".join(qdeploy(*options).stderr.split())
    assert re.search(r"backend (cpu|reference) \((?!asked)[^)]+\), (int8|fp32) activations", shown)
    assert "backend" not in qdeploy(*options, "-q").stderr
    assert "backend reference (asked" in qdeploy(*options, "--backend", "reference").stderr


def test_recipe_with_a_typo_is_named(tmp_path: Path) -> None:
    recipe = tmp_path / "typo.yaml"
    recipe.write_text("metod: awq\n")
    result = qdeploy("quantize", "m", "-o", tmp_path / "out", "--recipe", recipe)
    assert result.exit_code == 2
    assert "metod" in result.stderr


def test_recipes_are_listed() -> None:
    data = result_json(qdeploy("recipes", "--json"))
    assert "smollm2-135m-awq" in data


def test_doctor_names_the_backends() -> None:
    findings = result_json(qdeploy("doctor", "--json"))["findings"]
    assert any("reference" in finding["name"] + finding["detail"] for finding in findings)


def test_help_lists_commands_in_pipeline_order() -> None:
    lines = [line.strip(" │").split() for line in qdeploy("--help").stdout.splitlines()]
    names = ["quantize", "eval", "serve", "inspect", "recipes", "doctor"]
    assert [words[0] for words in lines if words and words[0] in names] == names
