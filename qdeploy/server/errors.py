"""OpenAI's error bodies: {"error": {message, type, param, code}} for whatever goes wrong."""

from __future__ import annotations

import json
import logging
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from qdeploy.errors import CapacityError, QdeployError, UsageError
from qdeploy.runtime.request_stream import (
    EngineDeadError,
    QueueFullError,
    RequestAbortedError,
    RequestTimeoutError,
    ServerDrainingError,
)

logger = logging.getLogger(__name__)

_TYPES = {401: "authentication_error", 404: "not_found_error", 405: "not_found_error"}
_RETRY_AFTER_S = "1"


class ApiError(Exception):
    """An answer with a 4xx or 5xx status; `param` names the request's field at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers

    @property
    def type(self) -> str:
        """OpenAI's error type for the status."""
        default = "server_error" if self.status >= 500 else "invalid_request_error"
        return _TYPES.get(self.status, default)

    def body(self) -> dict[str, Any]:
        """The JSON object of the answer."""
        error = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}

    def json(self) -> str:
        """`body` in ASCII, so that no text of the client (lone surrogates) breaks the answer."""
        return json.dumps(self.body(), ensure_ascii=True)


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400 that names the parameter."""
    return ApiError(400, message, param=param, code=code)


def to_api_error(error: BaseException) -> ApiError:
    """The answer to any exception; what the user can't have caused becomes a logged 500."""
    retry = {"Retry-After": _RETRY_AFTER_S}
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UsageError):
        return bad_request(str(error), error.param)
    if isinstance(error, CapacityError):
        return bad_request(str(error), code="capacity_exceeded")
    if isinstance(error, QueueFullError):
        return ApiError(503, str(error), code="queue_full", headers=retry)
    if isinstance(error, (ServerDrainingError, RequestAbortedError)):
        return ApiError(503, str(error), code="shutting_down", headers=retry)
    if isinstance(error, RequestTimeoutError):
        return ApiError(504, str(error), code="request_timeout")
    if isinstance(error, EngineDeadError):
        return ApiError(503, str(error), code="engine_dead")
    if isinstance(error, QdeployError):
        return ApiError(500, str(error))
    logger.error("unexpected error in a request", exc_info=error)
    return ApiError(500, f"internal error ({type(error).__name__}); see the server's log")


def error_response(error: ApiError) -> Response:
    """The error as an HTTP answer."""
    return Response(
        error.json(),
        status_code=error.status,
        media_type="application/json",
        headers=error.headers,
    )


def _http_exception(request: Request, error: HTTPException) -> ApiError:
    if error.status_code in (404, 405):
        message = f"{request.method} {request.url.path} is not a route of this server"
        headers = dict(error.headers) if error.headers else None
        return ApiError(error.status_code, message, code="unknown_url", headers=headers)
    return ApiError(error.status_code, str(error.detail))


def install_error_handlers(app: Starlette) -> None:
    """Every exception of a route, and unknown routes, answer with OpenAI's body."""

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return error_response(_http_exception(request, error))

    async def on_error(_request: Request, error: Exception) -> Response:
        return error_response(to_api_error(error))

    async def on_disconnect(_request: Request, _error: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it; nginx's code for the access log

    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(ClientDisconnect, on_disconnect)
    for kind in (
        ApiError,
        QdeployError,
        QueueFullError,
        ServerDrainingError,
        RequestAbortedError,
        RequestTimeoutError,
        EngineDeadError,
        Exception,
    ):
        app.add_exception_handler(kind, on_error)
