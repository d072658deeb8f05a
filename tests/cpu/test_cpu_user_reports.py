"""User reports through the commands, on compiled kernels and with the reference as the oracle."""

from __future__ import annotations

import json
from array import array
from ctypes import byref
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from cpu.quantized_models import KINDS, quantized_checkpoint
from qdeploy.cli import app
from qdeploy.errors import QdeployError
from qdeploy.kv.config import KVCacheConfig
from qdeploy.runtime.executors import load_executor
from qdeploy_kernels.cpu import abi
from qdeploy_kernels.cpu.library import load_library
from server.test_serve_command import started
from tiny_models import tiny_checkpoint


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("base") / "tiny")


def qdeploy(*args: object) -> dict[str, Any]:
    result = CliRunner().invoke(app, [*map(str, args), "--json"])
    assert result.exit_code == 0, result.output
    data: dict[str, Any] = json.loads(result.stdout)
    return data


def quantized(base: Path, out: Path, *extra: object) -> Path:
    options = ("--method", "rtn", "--group-size", 32, "--gate", "kl<100")
    qdeploy("quantize", base, "-o", out, *options, *extra)
    return out


def perplexity(folder: Path, *options: str) -> float:
    report = qdeploy("eval", folder, "--ctx-len", 32, "--gate", "kl<100", "--no-write", *options)
    found: float = report["metrics"]["perplexity"]
    return found


@pytest.mark.parametrize("symmetric", ["--symmetric", "--asymmetric"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a05_every_advertised_bit_width_works_from_quantize_to_eval(
    bits: int, symmetric: str, base: Path, tmp_path: Path
) -> None:
    out = quantized(base, tmp_path / "out", "--bits", bits, symmetric, "--eval", "none")
    expected = perplexity(out, "--backend", "reference")
    exact = perplexity(out, "--backend", "cpu", "--act", "fp32")
    assert exact == pytest.approx(expected, rel=1e-5)
    assert perplexity(out, "--backend", "cpu") == pytest.approx(expected, rel=0.02)


def test_q15_every_command_works_without_a_gpu(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is asked of CUDA, and compiled kernels are what `auto` measures and serves with."""

    def refuse(*args: object) -> None:
        raise AssertionError("CUDA was asked for")

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda._lazy_init", refuse)
    out = quantized(base, tmp_path / "out")
    record = json.loads((out / "qdeploy.json").read_text())["accuracy"][0]
    assert (record["backend"], record["act"]) == ("cpu", "int8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with started(str(out), "--served-model-name", "m") as (_, url):
        body = {"model": "m", "prompt": "Hi", "max_tokens": 4, "temperature": 0}
        reply = httpx.post(f"{url}/v1/completions", json=body, timeout=30)
    assert reply.status_code == 200, reply.text
    assert reply.json()["usage"]["completion_tokens"] >= 1


@pytest.mark.parametrize("name", ["cuda", "triton"])
def test_q15_a_backend_that_needs_a_gpu_is_one_line(name: str, base: Path) -> None:
    result = CliRunner().invoke(
        app, ["eval", str(base), "--reference", str(base), "--backend", name]
    )
    assert result.exit_code == 2
    errors = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert name in errors[0]
    assert "cpu" in errors[0]


def test_x12_a_width_that_is_not_advertised_raises(tmp_path: Path) -> None:
    """KV formats by name, and by number at the C ABI: none is read as another."""
    with pytest.raises(QdeployError, match="int3"):
        KVCacheConfig(dtype="int3")
    folder = quantized_checkpoint("llama", tmp_path, KINDS["awq"])
    executor: Any = load_executor(folder, backend="cpu", kv_config=KVCacheConfig(block_size=16))
    library = load_library()
    for dtype in (-1, len(abi.KVDtype), 99):
        layers = array("i", range(executor.spec.num_layers))
        place, count = layers.buffer_info()
        kv = abi.KVGroup(dtype=dtype, block_size=16, num_layers=count, layers=place)
        assert not library.cdll.qd_engine_create(executor.model.handle, byref(kv), 1)
        assert library.error() == f"the KV format {dtype} is unknown"
