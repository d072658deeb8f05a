"""Which backend is chosen and why, what the cpu executor refuses, and what it shares."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cpu.conftest import ISAS
from cpu.quantized_models import KINDS, quantized_checkpoint
from formats.layer_samples import random_layer
from qdeploy.errors import FormatError, UsageError
from qdeploy.kv.config import KVCacheConfig
from qdeploy.quantization.scheme import QuantScheme
from qdeploy.runtime.batch import SequenceSlice, StepBatch
from qdeploy.runtime.executors import load_executor
from qdeploy.runtime.executors.cpu import CpuExecutor, _LogitsMemory
from qdeploy.runtime.executors.cpu_model import _warn_if_dense
from qdeploy.runtime.llm import LLM
from qdeploy_kernels.cpu import library
from qdeploy_kernels.cpu.fusion import pack_matrix
from tables import pool_sizes, run_chunks
from tiny_models import tiny_checkpoint

KV = KVCacheConfig(dtype="int4", block_size=16)
TOKENS = list(range(3, 60))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def executor(folder: Path) -> CpuExecutor:
    loaded = load_executor(folder, backend="cpu", kv_config=KV, threads=2)
    assert isinstance(loaded, CpuExecutor)
    return loaded


def line(caplog: pytest.LogCaptureFixture) -> str:
    """The one line that says which backend was chosen."""
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("backend")]
    assert len(lines) == 1
    return lines[0]


def test_auto_prefers_compiled_kernels(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="qdeploy")
    loaded = load_executor(folder, kv_config=KV, threads=2)
    assert (loaded.name, loaded.act) == ("cpu", "int8")
    expected = "backend cpu (the fastest that runs here), int8 activations, KV cache int4/b16/s1/r0"
    assert line(caplog) == expected
    kernels = [r.getMessage() for r in caplog.records if "CPU kernels" in r.getMessage()]
    assert kernels == [f"CPU kernels for {ISAS[0]}, 2 threads, int8 activations"]


def test_auto_falls_back_with_its_reason(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No compiler when it was installed: everything works, and one line says why it is slow."""
    caplog.set_level(logging.INFO, logger="qdeploy")
    monkeypatch.setattr(library, "_FOLDER", tmp_path)
    loaded = load_executor(folder, kv_config=KV)
    assert (loaded.name, loaded.act) == ("reference", "fp32")
    assert "make kernels" in line(caplog)
    with pytest.raises(UsageError, match="make kernels"):
        load_executor(folder, backend="cpu", kv_config=KV)
    with pytest.raises(UsageError, match=r"make kernels.*backend reference computes in float32"):
        load_executor(folder, kv_config=KV, act="int8")


@pytest.mark.parametrize("size", [8, 2048])
def test_block_sizes_that_kernels_lack(
    folder: Path, size: int, caplog: pytest.LogCaptureFixture, executor: CpuExecutor
) -> None:
    caplog.set_level(logging.INFO, logger="qdeploy")
    kv = KVCacheConfig(block_size=size)
    assert load_executor(folder, kv_config=kv).name == "reference"
    assert f"block_size {size}" in line(caplog)
    for attempt in (
        lambda: load_executor(folder, backend="cpu", kv_config=kv),
        lambda: executor.with_kv(kv),
    ):
        with pytest.raises(UsageError, match=rf"block_size {size}.*--backend reference"):
            attempt()


def test_heads_that_kernels_lack(tmp_path: Path) -> None:
    narrow = tiny_checkpoint("llama", tmp_path, head_dim=24)
    assert load_executor(narrow, kv_config=KV).name == "reference"
    with pytest.raises(UsageError, match=r"head_dim 24.*--backend reference"):
        load_executor(narrow, backend="cpu", kv_config=KV)


@pytest.mark.parametrize("backend", ["auto", "cpu"])
def test_an_instruction_set_that_is_asked_for_is_an_error_if_missing(
    folder: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QDEPLOY_CPU_ISA", "sse9")
    with pytest.raises(UsageError, match=r"QDEPLOY_CPU_ISA=sse9.*avx|portable"):
        load_executor(folder, backend=backend, kv_config=KV)
    assert load_executor(folder, backend="reference", kv_config=KV).name == "reference"


def test_activations_are_said_and_never_ignored(folder: Path) -> None:
    for backend, act, expected in (
        ("cpu", None, "int8"),
        ("cpu", "fp32", "fp32"),
        ("auto", "fp32", "fp32"),
        ("reference", None, "fp32"),
        ("reference", "fp32", "fp32"),
    ):
        assert load_executor(folder, backend=backend, act=act, kv_config=KV).act == expected
    with pytest.raises(UsageError, match=r"float32.*--act fp32"):
        load_executor(folder, backend="reference", act="int8", kv_config=KV)
    with pytest.raises(UsageError, match=r"act 'int4'.*int8, fp32"):
        load_executor(folder, act="int4", kv_config=KV)


def test_activations_of_float8_are_bfloat16(tmp_path: Path) -> None:
    folder = quantized_checkpoint("llama", tmp_path, KINDS["float8 rows"])
    for act, expected in ((None, "bf16"), ("fp32", "fp32")):
        assert load_executor(folder, backend="cpu", act=act, kv_config=KV).act == expected
    with pytest.raises(UsageError, match=r"act 'int8' is for integer weights.*--act fp32"):
        load_executor(folder, backend="cpu", act="int8", kv_config=KV)


def test_llm_takes_act(folder: Path) -> None:
    llm = LLM(folder, act="fp32", max_model_len=64)
    assert llm.engine.executor.act == "fp32"


def test_exact_activations_hold_open_blocks_in_float32(folder: Path, executor: CpuExecutor) -> None:
    exact = load_executor(folder, backend="cpu", act="fp32", kv_config=KV)
    assert exact.open_block_bytes[0] == 2 * executor.open_block_bytes[0]
    assert executor.open_block_bytes[0] == 3 * 2 * 2 * 16 * 16 * 2  # layers, K and V, heads, …
    assert exact.sealed_block_bytes == executor.sealed_block_bytes > (0,)
    assert executor.with_kv(replace(KV, dtype="bf16")).sealed_block_bytes == (0,)


def piece(**changes: object) -> SequenceSlice:
    fields = {
        "token_ids": [1, 2],
        "start": 0,
        "open_blocks": [[0]],
        "sealed_blocks": [[-1]],
        "num_logits": 1,
    }
    return SequenceSlice(**(fields | changes))  # type: ignore[arg-type]


WRONG = {
    "token": {"token_ids": [1, 288]},
    "negative token": {"token_ids": [1, -1]},
    "start": {"start": -1},
    "logits": {"num_logits": 3},
    "open id": {"open_blocks": [[8]]},
    "sealed id": {"token_ids": [1] * 17, "open_blocks": [[0, 1]], "sealed_blocks": [[8, -1]]},
    "no open id": {"open_blocks": [[-1]]},
    "no place for a full block": {"token_ids": [1] * 16, "open_blocks": [[-1]]},
    "short table": {"start": 16},
    "uneven tables": {"sealed_blocks": [[]]},
    "no tokens": {"token_ids": [], "num_logits": 0},
}


@pytest.mark.parametrize("fault", WRONG)
def test_malformed_steps_are_errors_and_nothing_is_written(
    executor: CpuExecutor, fault: str
) -> None:
    mine = executor.with_kv(KV)
    mine.allocate_kv(pool_sizes(mine, 8, 8))
    with pytest.raises(RuntimeError, match=r"\w+ \w+"):
        mine.execute(StepBatch([piece(**WRONG[fault])]))
    assert mine.execute(StepBatch([piece()])).isfinite().all()


def test_a_step_before_its_pools_is_an_error(executor: CpuExecutor) -> None:
    with pytest.raises(RuntimeError):
        executor.with_kv(KV).execute(StepBatch([piece()]))


def test_an_empty_step_gives_no_rows(executor: CpuExecutor) -> None:
    assert executor.with_kv(KV).execute(StepBatch([])).shape == (0, 288)


def test_weights_are_shared_and_outlive_the_executor_that_loaded_them(folder: Path) -> None:
    first = load_executor(folder, backend="cpu", kv_config=KV, threads=1)
    assert isinstance(first, CpuExecutor)
    expected = run_chunks(first, TOKENS, [57])
    second = first.with_kv(KV)
    model = weakref.ref(first.model)
    del first
    gc.collect()
    assert torch.equal(run_chunks(second, TOKENS, [57]), expected)
    del second
    gc.collect()
    assert model() is None


def test_steps_from_several_python_threads_take_turns(executor: CpuExecutor) -> None:
    expected = run_chunks(executor, TOKENS, [57])
    found: list[bool] = []

    def work() -> None:
        mine = executor.with_kv(KV)
        for _ in range(5):
            found.append(torch.equal(run_chunks(mine, TOKENS, range(1, 58)), expected))

    workers = [threading.Thread(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert found == [True] * 15


def test_a_second_load_maps_the_first_ones_tiles(folder: Path, executor: CpuExecutor) -> None:
    expected = run_chunks(executor, TOKENS, [57])
    stamps = [p.stat().st_mtime_ns for p in (folder / "compiled").glob("*.tiles")]
    again = load_executor(folder, backend="cpu", kv_config=KV)
    assert torch.equal(run_chunks(again, TOKENS, [57]), expected)
    assert stamps == [p.stat().st_mtime_ns for p in (folder / "compiled").glob("*.tiles")]


def test_broken_weights_are_found_while_packing(folder: Path, tmp_path: Path) -> None:
    """x01: nothing that isn't finite is ever packed, so nothing broken is ever kept."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.2.mlp.down_proj.weight"][3, 3] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    for _ in range(2):
        with pytest.raises(FormatError, match=r"layers\.2\.mlp\.down_proj"):
            load_executor(tmp_path, backend="cpu", kv_config=KV)
    assert not list((tmp_path / "compiled").glob("*.tiles"))


def test_logits_stay_the_callers_own_while_anything_holds_them() -> None:
    memory = _LogitsMemory()
    first = memory.take(2, 32)
    first.fill_(1)
    view, row = first[:, :5], first[1].numpy()
    del first
    memory.take(2, 32).fill_(2)
    assert bool((view == 1).all())
    del view
    memory.take(1, 32).fill_(3)
    assert bool((row == 1).all())


def test_logits_memory_is_taken_again_once_it_is_free() -> None:
    memory = _LogitsMemory()
    place = memory.take(3, 32).data_ptr()
    assert memory.take(3, 32).data_ptr() == place
    assert memory.take(1, 64).shape == (1, 64)


def test_a_quantized_matrix_that_is_held_dense_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """P4: exact, but slower and larger than the user asked for."""
    part = random_layer(QuantScheme(bits=4, group_size=32), 32, 64, seed=1)
    fine = replace(part, scales=part.scales.float() * (1 + 2**-20))
    with caplog.at_level(logging.WARNING, logger="qdeploy"):
        _warn_if_dense("layer 3 o", [part], pack_matrix([part], [None]))
        assert not caplog.records
        _warn_if_dense("layer 3 o", [fine], pack_matrix([fine], [None]))
    assert [r.getMessage().split(":")[0] for r in caplog.records] == ["layer 3 o is held as F32"]
