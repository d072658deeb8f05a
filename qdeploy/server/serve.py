"""`qdeploy serve`: bind, load, answer, drain."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from qdeploy.progress import Progress, Silent
from qdeploy.server.listen import bind, run_server, url_of
from qdeploy.server.settings import ServerSettings
from qdeploy.server.stopwatch import Stopwatch


def serve(path: str | Path, settings: ServerSettings, progress: Progress | None = None) -> None:
    """Serve an artifact, folder or model reference until SIGTERM or Ctrl-C.

    Raises UsageError when the port is taken (before anything is loaded), and whatever resolving,
    checking and loading raise.
    """
    show: Progress = progress or Silent()
    watch = Stopwatch()
    settings = replace(settings, served_model_name=settings.served_model_name or str(path))
    with bind(settings.host, settings.port) as listener:
        with _no_collections():
            # torch takes seconds to import; a taken port is known before (user report H13)
            from qdeploy.server.loading import load

            watch.lap("imports")
            engine, app = load(str(path), settings, show, watch)
        url = url_of(listener)

        def announce() -> None:
            watch.lap("listening")
            show.info(f"ready: {url}/v1 serves {settings.served_model_name} (after {watch})")

        interrupted = run_server(app, engine, listener, settings, announce)
    if interrupted:
        raise KeyboardInterrupt


@contextmanager
def _no_collections() -> Iterator[None]:
    """No garbage is collected meanwhile, and what stays is never looked at again.

    Imports make 200,000 objects that live on. Collections look at them all: a tenth of the time of
    a start, and later 0.15 s in which neither a step nor a connection goes on.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()
