"""The listening socket, and uvicorn with a drain on SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import uvicorn
from starlette.types import ASGIApp

from qdeploy.errors import UsageError
from qdeploy.runtime.async_engine import AsyncEngine
from qdeploy.server.settings import ServerSettings

_BACKLOG = 2048
#: Beyond shutdown_timeout, for the answers that say so to be written.
_FAREWELL_S = 5


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Listening at once, a second server can't take the port while the
    weights load; clients wait in the backlog meanwhile.
    """
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


def url_of(listener: socket.socket) -> str:
    """Where a listening socket is reached."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run_server(
    app: ASGIApp,
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
