"""The CPU executor: the whole step, from token ids to logits, is one call into C++."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import weakref
from collections.abc import Sequence
from ctypes import byref
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qdeploy.errors import CapacityError, UsageError
from qdeploy.formats.checkpoint import Checkpoint
from qdeploy.kv.config import KVCacheConfig
from qdeploy.kv.groups import KVPoolSize, kv_groups
from qdeploy.models.spec import DecoderSpec
from qdeploy.progress import Progress
from qdeploy.runtime.batch import BlockIds, StepBatch
from qdeploy.runtime.executors.base import unallocated
from qdeploy.runtime.executors.cpu_kv import KVEngine
from qdeploy.runtime.executors.cpu_model import ModelData, checker, pack_model, unsupported
from qdeploy.runtime.executors.cpu_step import StepArrays
from qdeploy.runtime.executors.cpu_threads import default_threads
from qdeploy.runtime.executors.tile_cache import open_tiles
from qdeploy.runtime.executors.weights import WeightSource
from qdeploy_kernels.cpu import abi
from qdeploy_kernels.cpu.library import (
    CpuLibraryError,
    Library,
    cpu_library_problem,
    load_library,
)
from qdeploy_kernels.cpu.tiles import TILE_ROWS

log = logging.getLogger("qdeploy")


class CpuModel:
    """A model inside the library with its threads; executors that share it run one at a time.

    Everything that C++ reads lives as long as this object. weight_bytes: what a step reads of them.
    """

    def __init__(self, library: Library, data: ModelData, spec: DecoderSpec, threads: int) -> None:
        self.library, self.data, self.spec, self.threads = library, data, spec, threads
        self.act = data.activations
        self.weight_bytes = data.step_bytes()
        self.lock: threading.Lock | _LostLock = threading.Lock()
        self.handle = library.cdll.qd_model_create(byref(data.struct), threads)
        if not self.handle:
            raise CapacityError(
                f"a model can't run on {threads} threads: {library.error()}; give fewer threads"
            )
        weakref.finalize(self, _destroy, library.cdll.qd_model_destroy, self.handle, data)
        self.process = os.getpid()
        _MODELS.add(self)
        # Once, and later than weakref's own hook, so that it runs before it.
        atexit.unregister(_stop_for_good)
        atexit.register(_stop_for_good)

    def read_seconds(self, num_bytes: int, repeats: int) -> float:
        """Seconds of the fastest of `repeats` streaming reads by the model's threads: what a step
        that reads that many bytes can't beat.
        """
        with self.lock:
            seconds: float = self.library.cdll.qd_read_seconds(self.handle, num_bytes, repeats)
        return seconds


#: Those that live.
_MODELS: weakref.WeakSet[CpuModel] = weakref.WeakSet()


class _LostLock:
    """Instead of a lock whose holder stayed behind in the parent process."""

    def __enter__(self) -> None:
        raise RuntimeError("this process was forked during a step; load the model again in it")

    def __exit__(self, *_: object) -> None: ...


def _find_lost_locks() -> None:
    """In a forked child: nobody else runs here, so a lock that is held will never be released."""
    for model in list(_MODELS):
        if isinstance(model.lock, _LostLock) or model.lock.locked():
            model.lock = _LostLock()


os.register_at_fork(after_in_child=_find_lost_locks)


class CpuExecutor:
    """Implements Executor. Open blocks are bfloat16, with `act` fp32 float32; equal bits whatever
    the batch, the chunks and the threads, within one instruction set.
    """

    name = "cpu"

    def __init__(self, model: CpuModel, kv_config: KVCacheConfig) -> None:
        reason = unsupported(model.spec, kv_config)
        if reason is not None:
            raise UsageError(reason, param="backend")
        self.spec, self.kv_config, self.act = model.spec, kv_config, model.act
        self.model, self._library = model, model.library
        self.kv_groups = kv_groups(model.spec, kv_config)
        self._kv = KVEngine(model.library, model.handle, self.kv_groups)
        # The finalizer holds the model, which therefore outlives its engines.
        destroy = model.library.cdll.qd_engine_destroy
        weakref.finalize(self, _destroy, destroy, self._kv.handle, model)
        self.open_block_bytes = self._kv.open_block_bytes
        self.sealed_block_bytes = self._kv.sealed_block_bytes
        self._memory = _LogitsMemory()
        self._stride = model.spec.vocab_size + -model.spec.vocab_size % TILE_ROWS

    def allocate_kv(self, pools: Sequence[KVPoolSize]) -> None:
        """Allocate every group's pools; drops what they held before."""
        with self.model.lock:
            allocated = self._kv.allocate(pools)
        if not allocated:
            raise unallocated(self, pools)

    def with_kv(self, kv_config: KVCacheConfig) -> CpuExecutor:
        """A second executor on the same weights and threads, with KV pools of its own."""
        return CpuExecutor(self.model, kv_config)

    def execute(self, batch: StepBatch) -> Tensor:
        """Run one step: writes the slices' K/V, returns logits [batch.num_logits, vocab]."""
        arrays = StepArrays(batch, self.kv_config.block_size, len(self.kv_groups))
        with self.model.lock:  # memory, too: two threads must not both find it free
            logits = self._memory.take(arrays.num_logits, self._stride)
            step = arrays.struct(logits)
            failed = self._library.cdll.qd_execute(self._kv.handle, byref(step))
        if failed:
            raise RuntimeError(self._library.error())
        return logits[:, : self.spec.vocab_size]

    def read_blocks(self, ids: Sequence[BlockIds]) -> NDArray[np.uint8]:
        """The packed bytes of blocks; see Executor. RuntimeError for ids that the pools lack."""
        with self.model.lock:
            return self._kv.read(ids)

    def write_blocks(self, ids: Sequence[BlockIds], data: NDArray[np.uint8]) -> None:
        """Put back what `read_blocks` gave; RuntimeError when ids or the size don't fit."""
        with self.model.lock:
            self._kv.write(ids, data)


class _LogitsMemory:
    """Memory for results, taken again once nobody holds the last one: fresh pages cost a large
    batch as much as a tenth of its step.
    """

    def __init__(self) -> None:
        self._array = np.empty(0, np.float32)

    def take(self, rows: int, stride: int) -> Tensor:
        """[rows, stride], float32, uninitialized; the caller's own as long as it is held."""
        free = sys.getrefcount(self._array) == 2  # this object's and the call's own
        if not free or self._array.size < rows * stride:
            self._array = np.empty(rows * stride, np.float32)
        return torch.from_numpy(self._array)[: rows * stride].view(rows, stride)


def problem(spec: DecoderSpec, kv_config: KVCacheConfig) -> str | None:
    """Why this backend can't run a model here, with a next step; None if it can.

    Raises UsageError when the environment names an instruction set that isn't there.
    """
    try:
        missing = cpu_library_problem()
    except CpuLibraryError as error:
        raise UsageError(str(error), param="backend") from None
    return missing or unsupported(spec, kv_config)


def load_cpu_executor(
    checkpoint: Checkpoint,
    spec: DecoderSpec,
    kv_config: KVCacheConfig,
    *,
    act: str | None,
    threads: int | None,
    progress: Progress,
) -> CpuExecutor:
    """Map or pack the checkpoint's tiles and make an executor of them.

    act: int8 or fp32, None for int8 where weights are integers and bf16 where they are float8;
    threads: None for what suits this process. Raises FormatError for broken weights, UsageError
    for int8 with float8 weights; what `problem` names must have been ruled out.
    """
    library = load_library()
    threads = threads or default_threads()
    source = WeightSource(checkpoint, spec)
    arena = open_tiles(
        checkpoint, lambda writer: pack_model(source, spec, writer, progress), checker(spec)
    )
    data = ModelData(arena, spec, abi.ActMode[(act or "int8").upper()])
    if act not in (None, data.activations):
        raise UsageError(
            f"act {act!r} is for integer weights; these are float8, whose activations are bf16: "
            "leave --act out, or choose --act fp32",
            param="act",
        )
    shown = (library.isa, threads, data.activations)
    log.info("CPU kernels for %s, %d threads, %s activations", *shown)
    return CpuExecutor(CpuModel(library, data, spec, threads), kv_config)


def _stop_for_good() -> None:
    """At exit, wait for the steps of daemon threads and let no other begin.

    A forked child has no such threads, but perhaps a lock that one of them held.
    """
    for model in list(_MODELS):
        if model.process == os.getpid() and not isinstance(model.lock, _LostLock):
            model.lock.acquire()


def _destroy(function: Any, handle: int, kept: object) -> None:
    """Call a destructor; `kept` is what it still reads."""
    function(handle)
