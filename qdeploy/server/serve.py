"""`qdeploy serve`: bind, load, answer, drain."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from qdeploy.progress import Progress, Silent
from qdeploy.server.listen import bind, run_server, url_of
from qdeploy.server.settings import ServerSettings


def serve(path: str | Path, settings: ServerSettings, progress: Progress | None = None) -> None:
    """Serve an artifact, folder or model reference until SIGTERM or Ctrl-C.

    Raises UsageError when the port is taken (before anything is loaded), and whatever resolving,
    checking and loading raise.
    """
    show: Progress = progress or Silent()
    settings = replace(settings, served_model_name=settings.served_model_name or str(path))
    with bind(settings.host, settings.port) as listener:
        # torch takes seconds to import; a taken port is known before (user report H13)
        from qdeploy.server.loading import load

        engine, app = load(str(path), settings, show)
        url = url_of(listener)

        def announce() -> None:
            show.info(f"ready: {url}/v1 serves {settings.served_model_name}")

        interrupted = run_server(app, engine, listener, settings, announce)
    if interrupted:
        raise KeyboardInterrupt
