"""Exits, forks and threads that can't be had: none may hang, crash or give wrong numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from qdeploy.kv.config import KVCacheConfig
from qdeploy.kv.groups import KVPoolSize
from qdeploy.runtime.batch import SequenceSlice, StepBatch
from qdeploy.runtime.executors import load_executor
from qdeploy.runtime.executors.cpu import CpuExecutor, _LogitsMemory
from tiny_models import tiny_checkpoint

ROOT = Path(__file__).parents[2]
#: An executor of 3 threads, and a prompt of 6,400 tokens: a step of a good fraction of a second.
PRELUDE = """
import atexit, gc, os, resource, sys, threading, time
from pathlib import Path
import torch
from qdeploy.errors import CapacityError
from qdeploy.kv.config import KVCacheConfig
from qdeploy.kv.groups import KVPoolSize
from qdeploy.runtime.batch import SequenceSlice, StepBatch
from qdeploy.runtime.executors import load_executor

def load(threads):
    kv = KVCacheConfig(dtype="bf16", block_size=64)
    return load_executor(Path(sys.argv[1]), backend="cpu", kv_config=kv, threads=threads)

def step(count):
    blocks = list(range(-(-count // 64)))
    return StepBatch([SequenceSlice(
        token_ids=[1] * count, start=0, open_blocks=[blocks], sealed_blocks=[[-1] * len(blocks)])])

executor = load(3)
executor.allocate_kv([KVPoolSize(num_open_blocks=100, num_sealed_blocks=0)])
"""
AT_EXIT = """
def work():
    while True:
        executor.execute(step(6400))
        steps.append(1)
steps = []
threading.Thread(target=work, daemon=True).start()
while not steps:
    time.sleep(0.01)
"""
FORK = """
expected = executor.execute(step(70)).clone()
time.sleep(0.05)  # workers sleep
def same():
    assert all(torch.equal(executor.execute(step(70)), expected) for _ in range(20))
def drop():
    global executor
    del executor
    gc.collect()
def leave():
    atexit._run_exitfuncs()
for act in (same, drop, leave):
    child = os.fork()
    if child == 0:
        act()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7, act
same()
"""
FORK_IN_A_STEP = """
worker = threading.Thread(target=lambda: executor.execute(step(6400)))
worker.start()
while not executor.model.lock.locked():
    pass
if (child := os.fork()) == 0:
    try:
        executor.execute(step(1))
    except RuntimeError as error:
        os.write(1, str(error).encode())
    del executor
    gc.collect()
    atexit._run_exitfuncs()
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
worker.join()
executor.execute(step(1))
"""
LIMITED = """
pages = int(Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + (300 << 20),) * 2)  # 37 stacks of 8 MiB
try:
    load(512)
except CapacityError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("tiny"))


def in_a_process(program: str, folder: Path) -> str:
    """What the program prints; an exit that isn't clean fails the test."""
    paths = os.pathsep.join((str(ROOT), str(ROOT / "kernels")))
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + program, str(folder)],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_process_may_end_while_a_daemon_thread_computes(folder: Path) -> None:
    """The server's engine runs in such a thread."""
    in_a_process(AT_EXIT, folder)


def test_a_forked_child_computes_drops_and_ends(folder: Path) -> None:
    in_a_process(FORK, folder)


def test_a_child_that_is_forked_during_a_step_is_refused_and_ends(folder: Path) -> None:
    """Who holds the lock stayed behind: without a word, the child would wait for ever."""
    assert "forked during a step; load the model again" in in_a_process(FORK_IN_A_STEP, folder)


def test_threads_that_the_system_refuses_are_an_error(folder: Path) -> None:
    assert "give fewer threads" in in_a_process(LIMITED, folder)


def load(folder: Path, threads: int = 1) -> CpuExecutor:
    kv = KVCacheConfig(dtype="bf16", block_size=64)
    loaded = load_executor(folder, backend="cpu", kv_config=kv, threads=threads)
    assert isinstance(loaded, CpuExecutor)
    return loaded


def test_memory_for_logits_is_taken_while_no_other_thread_may(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else two threads that share an executor can both find it free."""
    executor = load(folder)
    executor.allocate_kv([KVPoolSize(num_open_blocks=1, num_sealed_blocks=0)])
    held: list[bool] = []
    take = _LogitsMemory.take

    def watched(self: _LogitsMemory, rows: int, stride: int) -> Tensor:
        held.append(executor.model.lock.locked())
        return take(self, rows, stride)

    monkeypatch.setattr(_LogitsMemory, "take", watched)
    piece = SequenceSlice(token_ids=[1], start=0, open_blocks=[[0]], sealed_blocks=[[-1]])
    executor.execute(StepBatch([piece]))
    assert held == [True]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_decoding_at_long_contexts_needs_little_memory(folder: Path) -> None:
    """Partial results of 250 splits are as many as there are queries, not as a tile could have."""
    executor = load(folder, threads=16)
    executor.allocate_kv([KVPoolSize(num_open_blocks=2031, num_sealed_blocks=0)])
    shared, start = list(range(1999)), 2000 * 64 - 1

    def decode(count: int, start: int) -> Tensor:
        pieces = [
            SequenceSlice(
                token_ids=[1],
                start=start,
                open_blocks=[[*shared[: start // 64], 2000 + i]],
                sealed_blocks=[[-1] * (start // 64 + 1)],
            )
            for i in range(count)
        ]
        return executor.execute(StepBatch(pieces))

    decode(31, 63)  # buffers that a step of 31 rows needs anyway
    before = resident_bytes()
    logits = decode(31, start)
    assert all(torch.equal(row, logits[0]) for row in logits)
    assert resident_bytes() - before < 30 << 20
