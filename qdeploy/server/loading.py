"""From a model reference to an engine and its app."""

from __future__ import annotations

from pathlib import Path

from starlette.applications import Starlette

from qdeploy.formats.checkpoint import open_checkpoint
from qdeploy.formats.manifest import Manifest, read_manifest
from qdeploy.formats.sources import resolve_model
from qdeploy.kv.config import KVCacheConfig
from qdeploy.progress import Progress
from qdeploy.runtime.async_engine import AsyncEngine
from qdeploy.runtime.engine_config import EngineConfig
from qdeploy.runtime.engine_loading import load_engine
from qdeploy.runtime.executors import load_executor
from qdeploy.runtime.executors.base import Executor
from qdeploy.runtime.llm import resolve_kv_config
from qdeploy.runtime.sampling_params import sampling_defaults
from qdeploy.runtime.tokenizer import Tokenizer
from qdeploy.server.app import create_app
from qdeploy.server.settings import ServerSettings
from qdeploy.server.stopwatch import Stopwatch
from qdeploy.server.verify import check_verified


def load(
    path: str, settings: ServerSettings, progress: Progress, watch: Stopwatch
) -> tuple[AsyncEngine, Starlette]:
    """Resolve, check and load a model; returns the engine (not started) and its app."""
    folder = resolve_model(path, progress)
    kv = resolve_kv_config(folder, settings.kv_cache_dtype, settings.block_size)
    if settings.verify_checksums:
        open_checkpoint(folder, verify_checksums=True)
    manifest = read_manifest(folder)
    # a missing or failed record is known before the weights are loaded
    check_verified(manifest, kv, "auto", settings.allow_unverified, artifact=path)
    watch.lap("checks")
    tokenizer = Tokenizer.load(folder)
    watch.lap("tokenizer")
    executor = _executor(path, folder, kv, manifest, settings, progress)
    watch.lap("weights")
    engine = _engine(folder, executor, tokenizer, settings, kv, progress)
    watch.lap("KV cache")
    _describe(executor, engine, kv, manifest, progress)
    app = create_app(engine, tokenizer, settings, sampling_defaults=sampling_defaults(folder))
    watch.lap("app")
    return engine, app


def _executor(
    path: str,
    folder: Path,
    kv: KVCacheConfig,
    manifest: Manifest | None,
    settings: ServerSettings,
    progress: Progress,
) -> Executor:
    executor = load_executor(
        folder,
        backend=settings.backend,
        act=settings.act,
        kv_config=kv,
        threads=settings.threads,
        progress=progress,
    )
    warnings = check_verified(
        manifest,
        kv,
        executor.name,
        settings.allow_unverified,
        act=executor.act,
        artifact=path,
    )
    for warning in warnings:
        progress.warn(warning)
    return executor


def _engine(
    folder: Path,
    executor: Executor,
    tokenizer: Tokenizer,
    settings: ServerSettings,
    kv: KVCacheConfig,
    progress: Progress,
) -> AsyncEngine:
    config = EngineConfig(
        kv=kv,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        enable_chunked_prefill=settings.enable_chunked_prefill,
        enable_prefix_caching=settings.enable_prefix_caching,
        preemption=settings.preemption,
        swap_space_bytes=settings.swap_space_bytes,
        kv_cache_memory_bytes=settings.kv_cache_memory_bytes,
        num_kv_blocks=settings.num_kv_blocks,
        speculative=settings.speculative,
        seed=settings.seed,
    )
    engine = load_engine(
        executor,
        config,
        folder=folder,
        tokenizer=tokenizer,
        threads=settings.threads,
        progress=progress,
    )
    return AsyncEngine(
        engine,
        max_num_seqs=settings.max_num_seqs,
        max_waiting=settings.max_queued_requests,
        request_timeout=settings.request_timeout,
    )


def _describe(
    executor: Executor,
    engine: AsyncEngine,
    kv: KVCacheConfig,
    manifest: Manifest | None,
    progress: Progress,
) -> None:
    if manifest is not None and manifest.embeddings is not None:
        progress.info(f"embedding and head: {manifest.embeddings.key} (the artifact's policy)")
    stats = engine.stats
    progress.info(
        f"backend {executor.name}, {executor.act} activations · KV {kv.key} · "
        f"{stats.num_open_blocks} open + {stats.num_sealed_blocks} sealed blocks of "
        f"{kv.block_size} tokens · context {engine.max_model_len}"
    )
