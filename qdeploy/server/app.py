"""The Starlette application: routes, middleware, and the engine's life around them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware

from qdeploy.runtime.async_engine import AsyncEngine
from qdeploy.runtime.tokenizer import Tokenizer
from qdeploy.server.completions import completion_routes
from qdeploy.server.context import ServerContext
from qdeploy.server.errors import install_error_handlers
from qdeploy.server.metrics import ServerMetrics
from qdeploy.server.middleware import ApiKeyMiddleware, BodyLimitMiddleware
from qdeploy.server.prompts import ParamsBuilder
from qdeploy.server.service_routes import service_routes
from qdeploy.server.settings import ServerSettings


def create_app(
    engine: AsyncEngine,
    tokenizer: Tokenizer,
    settings: ServerSettings,
    *,
    sampling_defaults: Mapping[str, Any] | None = None,
) -> Starlette:
    """An app that starts `engine` with its lifespan and stops it at the end.

    sampling_defaults: what generation_config.json says, under SamplingParams' names.
    """
    metrics = ServerMetrics(engine)
    engine.observer = metrics
    context = ServerContext(
        engine=engine,
        tokenizer=tokenizer,
        settings=settings,
        params=ParamsBuilder(sampling_defaults or {}),
        model=settings.served_model_name or "default",
    )

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        engine.start()
        yield
        await engine.drain(0)
        await engine.stop()

    routes = [*completion_routes(context), *service_routes(context, metrics)]
    app = Starlette(routes=routes, lifespan=lifespan)
    install_error_handlers(app)
    _add_middleware(app, settings)
    return app


def _add_middleware(app: Starlette, settings: ServerSettings) -> None:
    """The last one added is the outermost: CORS answers preflights before the key is asked."""
    app.add_middleware(BodyLimitMiddleware, limit=settings.max_body_size)
    if settings.api_key is not None:
        app.add_middleware(ApiKeyMiddleware, api_key=settings.api_key)
    if settings.cors_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origin),
            allow_methods=["*"],
            allow_headers=["*"],
        )
