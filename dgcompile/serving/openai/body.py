"""Reading a request's body, of which nothing is trusted: not its length, not its type, not that it ever ends."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect, Request

from dgcompile.serving.openai.errors import ApiError

BODY_SECONDS = 60.0
"""Seconds that a body may take to arrive: who sends one byte a minute must not hold a connection for ever."""


async def read_body(request: Request, limit: int) -> bytes:
    """The body of a request.

    Args:
        request: the request.
        limit: most bytes of a body.

    Raises:
        ApiError: 413 for a larger body, found before it is read where its length is declared, and else while it is;
            415 if it is not declared as JSON (so that no web page can send one without asking the browser's leave);
            408 if it does not arrive; 400 if the client went away.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"the Content-Type is {kind!r:.80}; expected application/json")
    declared = request.headers.get("content-length", "0")  # h11 has checked that it is a number
    if int(declared) > limit:
        raise _too_large(limit)
    try:
        return await asyncio.wait_for(_read(request, limit), BODY_SECONDS)
    except (asyncio.TimeoutError, TimeoutError) as error:
        raise ApiError(408, f"the body did not arrive within {BODY_SECONDS:g} s") from error
    except ClientDisconnect as error:
        raise ApiError(400, "the client went away before its body had arrived") from error


async def _read(request: Request, limit: int) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise _too_large(limit)
    return bytes(body)


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413, f"the body has more than {limit} bytes; send less, or start the server with a larger --max-request-bytes"
    )
