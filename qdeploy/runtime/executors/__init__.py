"""Executors: one DecoderSpec, several backends. Implementations are imported when chosen."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qdeploy.errors import UsageError
from qdeploy.kv.config import KVCacheConfig
from qdeploy.progress import Progress, Silent
from qdeploy.registry import Registry

if TYPE_CHECKING:
    from qdeploy.formats.checkpoint import Checkpoint
    from qdeploy.models.spec import DecoderSpec
    from qdeploy.runtime.executors.base import Executor

log = logging.getLogger("qdeploy")

#: What activations of quantized weights are multiplied as; the default depends on the backend.
ACT_MODES = ("int8", "fp32")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorOptions:
    """What a backend is loaded with; None: its own default."""

    kv_config: KVCacheConfig
    act: str | None = None
    threads: int | None = None
    progress: Progress


@dataclass(frozen=True, slots=True)
class Backend:
    """load: makes an executor. problem: why it can't run a model here, None if it can; it raises
    UsageError when the environment asks for what isn't there.
    """

    load: Callable[[Checkpoint, DecoderSpec, ExecutorOptions], Executor]
    problem: Callable[[DecoderSpec, ExecutorOptions], str | None]


def _load_cpu(checkpoint: Checkpoint, spec: DecoderSpec, options: ExecutorOptions) -> Executor:
    from qdeploy.runtime.executors.cpu import load_cpu_executor

    return load_cpu_executor(
        checkpoint,
        spec,
        options.kv_config,
        act=options.act,
        threads=options.threads,
        progress=options.progress,
    )


def _cpu_problem(spec: DecoderSpec, options: ExecutorOptions) -> str | None:
    from qdeploy.runtime.executors.cpu import problem

    return problem(spec, options.kv_config)


def _load_reference(
    checkpoint: Checkpoint, spec: DecoderSpec, options: ExecutorOptions
) -> Executor:
    from qdeploy.runtime.executors.reference import ReferenceExecutor
    from qdeploy.runtime.executors.weights import load_weights

    if options.threads is not None:
        import torch

        torch.set_num_threads(options.threads)
    return ReferenceExecutor(
        spec, load_weights(checkpoint, spec, options.progress), options.kv_config
    )


def _reference_problem(_: DecoderSpec, options: ExecutorOptions) -> str | None:
    if options.act == "int8":
        return "backend reference computes in float32; use --act fp32, or leave --act out"
    return None


#: The fastest first: `auto` takes the first one without a problem.
BACKENDS: Registry[Backend] = Registry("backend")
BACKENDS.add("cpu", Backend(_load_cpu, _cpu_problem))
BACKENDS.add("reference", Backend(_load_reference, _reference_problem))


def load_executor(
    path: Path,
    *,
    backend: str = "auto",
    kv_config: KVCacheConfig,
    threads: int | None = None,
    act: str | None = None,
    progress: Progress | None = None,
) -> Executor:
    """Load a checkpoint folder into a backend; its KV pools aren't allocated yet.

    backend: a name in BACKENDS, or `auto` for the fastest that runs this model here. threads: of
    the backend; for the reference backend torch's, in the whole process. act: activations of
    quantized weights as dynamic `int8` or exactly as `fp32`; None is int8 on the cpu backend (bf16
    for float8 weights) and fp32 on the reference backend. Raises UsageError for what can't be
    honoured, FormatError for a bad checkpoint.
    """
    _check_options(threads, act)
    from qdeploy.formats.checkpoint import open_checkpoint
    from qdeploy.models.spec import spec_from_config

    if backend != "auto":
        BACKENDS.get(backend)
    checkpoint = open_checkpoint(path)
    spec = spec_from_config(checkpoint.config)
    shown = Silent() if progress is None else progress
    for note in checkpoint.notes:
        shown.warn(note)
    options = ExecutorOptions(kv_config=kv_config, act=act, threads=threads, progress=shown)
    name, why = _choose(backend, spec, options)
    executor = BACKENDS.get(name).load(checkpoint, spec, options)
    kv = kv_config.key
    log.info("backend %s (%s), %s activations, KV cache %s", name, why, executor.act, kv)
    return executor


def _check_options(threads: int | None, act: str | None) -> None:
    if threads is not None and threads < 1:
        raise UsageError(f"threads={threads} is not possible; give 1 or more", param="threads")
    if act is not None and act not in ACT_MODES:
        raise UsageError(
            f"act {act!r} is unknown; choose one of {', '.join(ACT_MODES)}", param="act"
        )


def _choose(backend: str, spec: DecoderSpec, options: ExecutorOptions) -> tuple[str, str]:
    """A backend's name and why it was chosen; UsageError when none can do what was asked."""
    if backend != "auto":
        problem = BACKENDS.get(backend).problem(spec, options)
        if problem is not None:
            raise UsageError(problem, param="backend")
        return backend, "asked for"
    problems: list[str] = []
    for name in BACKENDS:
        problem = BACKENDS.get(name).problem(spec, options)
        if problem is None:
            return name, "; ".join(problems) or "the fastest that runs here"
        problems.append(problem)
    raise UsageError("; ".join(problems), param="backend")
