"""`qdeploy serve`: bind, check, load, answer, drain."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from qdeploy.errors import UsageError
from qdeploy.formats.checkpoint import open_checkpoint
from qdeploy.formats.manifest import read_manifest
from qdeploy.formats.sources import resolve_model
from qdeploy.progress import Progress, Silent
from qdeploy.runtime.async_engine import AsyncEngine
from qdeploy.runtime.engine import Engine, EngineConfig
from qdeploy.runtime.executors import load_executor
from qdeploy.runtime.llm import resolve_kv_config
from qdeploy.runtime.sampling_params import sampling_defaults
from qdeploy.runtime.tokenizer import Tokenizer
from qdeploy.server.app import create_app
from qdeploy.server.settings import ServerSettings
from qdeploy.server.verify import check_verified

_BACKLOG = 2048
#: Beyond shutdown_timeout, for the answers that say so to be written.
_FAREWELL_S = 5


def serve(path: str | Path, settings: ServerSettings, progress: Progress | None = None) -> None:
    """Serve an artifact, folder or model reference until SIGTERM or Ctrl-C.

    Raises UsageError when the port is taken (before anything is loaded), and whatever resolving,
    checking and loading raise.
    """
    progress = progress or Silent()
    settings = replace(settings, served_model_name=settings.served_model_name or str(path))
    with bind(settings.host, settings.port) as listener:
        engine, app = load(str(path), settings, progress)
        url = url_of(listener)

        def announce() -> None:
            name = settings.served_model_name
            progress.info(f"serving {name} on {url} (OpenAI API at {url}/v1)")

        interrupted = run_server(app, engine, listener, settings, announce)
    if interrupted:
        raise KeyboardInterrupt


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Listening at once, a second server can't take the port while the
    weights load; clients wait in the backlog meanwhile."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise UsageError(
            f"host {host!r}: {error.strerror}; give an address of this machine", param="host"
        ) from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise UsageError(
            f"port {port} on {host}: {error.strerror}; choose another with --port", param="port"
        ) from None
    return listener


def load(path: str, settings: ServerSettings, progress: Progress) -> tuple[AsyncEngine, FastAPI]:
    """Resolve, check and load a model; returns the engine (not started) and its app."""
    folder = resolve_model(path, progress)
    kv = resolve_kv_config(folder, settings.kv_cache_dtype, settings.block_size)
    if settings.verify_checksums:
        open_checkpoint(folder, verify_checksums=True)
    manifest = read_manifest(folder)
    # a missing or failed record is known before the weights are loaded
    check_verified(manifest, kv, "", settings.allow_unverified, artifact=path)
    tokenizer = Tokenizer.load(folder)
    executor = load_executor(
        folder,
        backend=settings.backend,
        kv_config=kv,
        threads=settings.threads,
        progress=progress,
    )
    allow = settings.allow_unverified
    for warning in check_verified(manifest, kv, executor.name, allow, artifact=path):
        progress.warn(warning)
    config = EngineConfig(
        kv=kv,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        enable_chunked_prefill=settings.enable_chunked_prefill,
        kv_cache_memory_bytes=settings.kv_cache_memory_bytes,
        num_kv_blocks=settings.num_kv_blocks,
        seed=settings.seed,
    )
    engine = AsyncEngine(
        Engine(executor, config, tokenizer.eos_token_ids, tokenizer=tokenizer),
        max_num_seqs=settings.max_num_seqs,
        max_waiting=settings.max_queued_requests,
        request_timeout=settings.request_timeout,
    )
    stats = engine.stats
    progress.info(
        f"backend {executor.name} · KV {kv.key} · {stats.num_open_blocks} open + "
        f"{stats.num_sealed_blocks} sealed blocks of {kv.block_size} tokens · context "
        f"{engine.max_model_len}"
    )
    app = create_app(
        engine,
        tokenizer,
        settings,
        sampling_defaults=sampling_defaults(folder),
    )
    return engine, app


def url_of(listener: socket.socket) -> str:
    """Where a listening socket is reached."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run_server(
    app: FastAPI,
    engine: AsyncEngine,
    listener: socket.socket,
    settings: ServerSettings,
    on_ready: Callable[[], None],
) -> bool:
    """Answer until a signal, then drain; returns whether the signal was Ctrl-C."""
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="on",
        timeout_graceful_shutdown=int(settings.shutdown_timeout) + _FAREWELL_S,
    )
    server = DrainingServer(config, engine, settings.shutdown_timeout, on_ready)
    asyncio.run(server.serve(sockets=[listener]))
    return server.interrupted


class DrainingServer(uvicorn.Server):
    """On a signal: no new requests, open ones may finish for shutdown_timeout seconds.

    A second Ctrl-C ends it at once.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        engine: AsyncEngine,
        shutdown_timeout: float,
        on_ready: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self.interrupted = False
        self._engine = engine
        self._shutdown_timeout = shutdown_timeout
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Announce the URL once requests are answered."""
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain the engine while uvicorn waits for its connections."""
        drain = asyncio.ensure_future(self._engine.drain(self._shutdown_timeout))
        await super().shutdown(sockets)
        if not self.force_exit:
            await drain

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but a drained SIGTERM is a clean exit and isn't raised again."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {s: signal.signal(s, self._on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: object) -> None:
        if number == signal.SIGINT:
            self.interrupted = True
        self.handle_exit(number, None)
