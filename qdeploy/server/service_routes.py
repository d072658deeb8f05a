"""Everything beside generation: models, health, version, metrics, tokenize."""

from __future__ import annotations

import asyncio

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from qdeploy import __version__
from qdeploy.server.context import ServerContext
from qdeploy.server.errors import ApiError, bad_request
from qdeploy.server.metrics import ServerMetrics
from qdeploy.server.prompts import chat_prompt
from qdeploy.server.schema import DetokenizeBody, TokenizeBody, read_body


def service_routes(context: ServerContext, metrics: ServerMetrics) -> list[Route]:
    """GET routes and the tokenizer's two."""

    async def health(_request: Request) -> Response:
        return _health(context)

    async def ready(_request: Request) -> Response:
        if context.engine.draining:
            return JSONResponse({"status": "draining"}, status_code=503)
        return _health(context)

    async def version(_request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def scrape(_request: Request) -> Response:
        return Response(
            generate_latest(metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

    async def models(_request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_model(context)]})

    async def model(request: Request) -> Response:
        context.check_model(request.path_params["name"])
        return JSONResponse(_model(context))

    async def tokenize(request: Request) -> Response:
        return await _tokenize(request, context)

    async def detokenize(request: Request) -> Response:
        return await _detokenize(request, context)

    return [
        Route("/health", health),
        Route("/ready", ready),
        Route("/version", version),
        Route("/metrics", scrape),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
    ]


def _health(context: ServerContext) -> Response:
    """200 while the engine lives, however busy; 503 when it is dead or a step is stuck (H09)."""
    engine = context.engine
    age = round(engine.last_step_age, 3)
    if not engine.alive:
        body = {"status": "dead", "error": str(engine.error), "last_step_age_s": age}
    elif age > context.settings.stall_timeout:
        body = {"status": "stalled", "last_step_age_s": age}
    else:
        return JSONResponse({"status": "ok", "last_step_age_s": age})
    return JSONResponse(body, status_code=503)


def _model(context: ServerContext) -> dict[str, object]:
    return {
        "id": context.model,
        "object": "model",
        "created": context.created,
        "owned_by": "qdeploy",
        "max_model_len": context.engine.max_model_len,
    }


async def _tokenize(request: Request, context: ServerContext) -> Response:
    body = await read_body(request, TokenizeBody)
    context.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give either prompt or messages", "prompt")
    if body.messages is not None:
        if body.add_special_tokens is not None:
            raise bad_request(
                "add_special_tokens goes with prompt; the chat template decides for messages",
                "add_special_tokens",
            )
        ids = (await chat_prompt(body.messages, context.tokenizer)).token_ids
    else:
        text = body.prompt or ""
        special = body.add_special_tokens is not False
        ids = await asyncio.to_thread(context.tokenizer.encode, text, special)
    limit = context.engine.max_model_len
    return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": limit})


async def _detokenize(request: Request, context: ServerContext) -> Response:
    body = await read_body(request, DetokenizeBody)
    context.check_model(body.model)
    size = context.tokenizer.vocab_size
    bad = next((token for token in body.tokens if not 0 <= token < size), None)
    if bad is not None:
        raise ApiError(400, f"tokens holds id {bad}; ids go from 0 to {size - 1}", param="tokens")
    text = await asyncio.to_thread(context.tokenizer.decode, body.tokens, skip_special_tokens=False)
    return JSONResponse({"prompt": text})
