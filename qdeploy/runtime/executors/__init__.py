"""Executors: one DecoderSpec, several backends. Implementations are imported when chosen."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from qdeploy.errors import UsageError
from qdeploy.kv.config import KVCacheConfig
from qdeploy.progress import Progress, Silent
from qdeploy.registry import Registry

if TYPE_CHECKING:
    from qdeploy.runtime.executors.base import Executor

log = logging.getLogger("qdeploy")

Factory = Callable[[Path, KVCacheConfig, Progress], "Executor"]
BACKENDS: Registry[Factory] = Registry("backend")


def _reference(path: Path, kv_config: KVCacheConfig, progress: Progress) -> Executor:
    from qdeploy.formats.checkpoint import open_checkpoint
    from qdeploy.models.spec import spec_from_config
    from qdeploy.runtime.executors.reference import ReferenceExecutor
    from qdeploy.runtime.executors.weights import load_weights

    checkpoint = open_checkpoint(path)
    spec = spec_from_config(checkpoint.config)
    return ReferenceExecutor(spec, load_weights(checkpoint, spec, progress), kv_config)


BACKENDS.add("reference", _reference)


def load_executor(
    path: Path,
    *,
    backend: str = "auto",
    kv_config: KVCacheConfig,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Executor:
    """Load a checkpoint folder into a backend; its KV pools aren't allocated yet.

    backend: a name in BACKENDS, or `auto` for the best that runs here. threads: of torch, for the
    whole process. Raises UsageError for an unknown backend, FormatError for a bad checkpoint.
    """
    name = backend if backend != "auto" else "reference"
    factory = BACKENDS.get(name)
    if threads is not None:
        if threads < 1:
            raise UsageError(f"threads={threads} is not possible; give 1 or more", param="threads")
        import torch

        torch.set_num_threads(threads)
    why = "asked for" if backend != "auto" else "the only backend of this version"
    log.info("backend %s (%s), KV cache %s", name, why, kv_config.key)
    return factory(path, kv_config, progress or Silent())
