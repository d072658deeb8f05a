"""Pure ASGI middleware: the API key and the limit of body sizes."""

from __future__ import annotations

import hashlib
import hmac

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qdeploy.server.errors import ApiError, error_response

#: The only route that a probe may ask without the key.
OPEN_ROUTES = frozenset({"/health"})


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()


class ApiKeyMiddleware:
    """401 unless `Authorization: Bearer KEY` is right; digests are compared in constant time.

    OPTIONS passes: a browser's preflight can't carry the key, and no route runs on OPTIONS.
    """

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._expected = _digest(api_key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._allowed(scope):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401,
            "missing or wrong API key; send it as 'Authorization: Bearer KEY'",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await error_response(error)(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        if scope["method"] == "OPTIONS" or scope["path"] in OPEN_ROUTES:
            return True
        given = dict(scope["headers"]).get(b"authorization", b"")
        kind, _, key = given.partition(b" ")
        return kind.lower() == b"bearer" and hmac.compare_digest(
            _digest(key.strip()), self._expected
        )


class BodyLimitMiddleware:
    """413 for a body of more than `limit` bytes, declared by Content-Length or sent in chunks."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self._limit:
            await error_response(self._error())(scope, receive, send)
            return
        await self._app(scope, self._counted(receive), send)

    def _counted(self, receive: Receive) -> Receive:
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._limit:
                raise self._error()
            return message

        return counted

    def _error(self) -> ApiError:
        message = f"the body is larger than {self._limit} bytes (--max-body-size)"
        return ApiError(413, message, code="body_too_large", headers={"Connection": "close"})
