"""Errors in OpenAI's shape: ``{"error": {"message", "type", "param", "code"}}`` with the status that clients act on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from dgcompile.errors import DgcompileError, OverloadedError, RequestError

RETRY_SECONDS = 1
"""``Retry-After`` of a request that a little patience helps: a row becomes free every few denoising steps."""

MAX_MESSAGE = 1000
"""Characters of a message: what it quotes of a request may be as long as the request."""

MAX_PARAM = 100
"""Characters of a field's name."""

INVALID = "invalid_request_error"
SERVER = "server_error"


class ApiError(Exception):
    """A request that gets an error as its answer.

    Args:
        status: the HTTP status.
        message: what was wrong, what was expected, what to do.
        kind: OpenAI's ``type``.
        param: the field at fault.
        code: a word that programs can compare.
        headers: further headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]} ...")
        self.status = status
        self.kind = kind
        self.param = param and param[:MAX_PARAM]
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The error object."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The whole response."""
        return json_response(self.body(), self.status, self.headers)


def unavailable(message: str, code: str) -> ApiError:
    """503: the server cannot answer now, but it, or another one behind the same address, soon can."""
    return ApiError(503, message, kind=SERVER, code=code, headers={"Retry-After": str(RETRY_SECONDS)})


def closing() -> ApiError:
    """503: the server is being stopped."""
    return unavailable("the server is being stopped; ask again, of another one or later", "closing")


def from_error(error: DgcompileError) -> ApiError:
    """What a client is told of one of our errors."""
    if isinstance(error, RequestError):
        return ApiError(400, str(error))
    if isinstance(error, OverloadedError):
        headers = {"Retry-After": str(RETRY_SECONDS)}
        return ApiError(429, str(error), kind="rate_limit_error", code="queue_full", headers=headers)
    return ApiError(500, str(error), kind=SERVER, code="engine_failed")


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON response. ASCII only, because what a message quotes may hold characters that UTF-8 cannot."""
    return Response(json.dumps(value), status, headers, media_type="application/json")
