"""The routes of the OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Depends, FastAPI
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from dgcompile.errors import DgcompileError
from dgcompile.serving.openai.answer import Answer, Cancelled, cancel_on_disconnect
from dgcompile.serving.openai.body import read_body
from dgcompile.serving.openai.envelope import ChatEnvelope, Envelope, TextEnvelope
from dgcompile.serving.openai.errors import SERVER, ApiError, json_response
from dgcompile.serving.openai.front import Front
from dgcompile.serving.openai.metrics import make_registry
from dgcompile.serving.openai.schema import ChatRequest, TextRequest
from dgcompile.serving.service import Delta

CLIENT_CLOSED = 499
"""nginx's status for a client that went away; nobody reads it."""


def create_app(front: Front) -> FastAPI:
    """The application.

    Args:
        front: the served model; its service may be put in later.
    """
    # No pages about itself: they would load scripts from other hosts.
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    _handle_errors(app, front)
    app.include_router(_probes(front))
    app.include_router(_api(front))
    return app


def _handle_errors(app: FastAPI, front: Front) -> None:
    """Every error in OpenAI's shape."""

    @app.exception_handler(ApiError)
    async def on_api_error(_: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(DgcompileError)
    async def on_our_error(_: Request, error: DgcompileError) -> Response:
        return front.api_error(error).response()

    @app.exception_handler(HTTPException)
    async def on_no_route(request: Request, error: HTTPException) -> Response:
        return _no_route(request, error).response()

    @app.exception_handler(Exception)
    async def on_fault(_: Request, error: Exception) -> Response:
        # Starlette raises it again afterwards, and uvicorn logs it.
        fault = ApiError(500, "the server failed; its log says why", kind=SERVER, code="internal_error")
        return fault.response()


def _api(front: Front) -> APIRouter:
    """OpenAI's routes, behind the key."""

    async def check_key(request: Request) -> None:
        front.check_key(request.headers.get("authorization"))

    router = APIRouter(prefix="/v1", dependencies=[Depends(check_key)])

    @router.post("/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await _answer(front, request, ChatRequest, ChatEnvelope)

    @router.post("/completions")
    async def completions(request: Request) -> Response:
        return await _answer(front, request, TextRequest, TextEnvelope)

    @router.get("/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [_model(front)]})

    @router.get("/models/{name:path}")
    async def model(name: str) -> Response:
        front.check_model(name)
        return json_response(_model(front))

    return router


def _probes(front: Front) -> APIRouter:
    """What watches the server, and bears no key."""
    router = APIRouter()
    registry = make_registry(front.statistics)

    @router.get("/health")
    async def health() -> Response:
        # A process that is loading or closing is well.
        front.check_engine()
        return json_response({"status": "ok"})

    @router.get("/ready")
    async def ready() -> Response:
        front.check_ready()
        return json_response({"status": "ready"})

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    return router


async def _answer(
    front: Front, request: Request, schema: type[ChatRequest] | type[TextRequest], envelope_of: type[Envelope]
) -> Response:
    """Answers one request, whole or as a stream."""
    service = front.check_ready()
    try:
        body = await read_body(request, front.max_request_bytes)
    except ApiError:
        service.count_refused()
        raise
    answer = Answer(asyncio.get_running_loop())
    streams = False
    try:
        asked = await run_in_threadpool(front.submit, body, schema, answer)
        envelope = envelope_of(front.model_name)
        if asked.stream:
            streams = True
            return _EventStream(_events(front, envelope, answer, include_usage=asked.include_usage), answer)
        watcher = asyncio.create_task(cancel_on_disconnect(request.receive, answer))
        try:
            return json_response(envelope.whole(await answer.completion()))
        except Cancelled:
            return Response(status_code=CLIENT_CLOSED)
        finally:
            watcher.cancel()
    finally:
        if not streams:
            answer.cancel()


async def _events(front: Front, envelope: Envelope, answer: Answer, *, include_usage: bool) -> AsyncIterator[bytes]:
    """The server-sent events of one answer."""
    first = envelope.first_chunk()
    if first is not None:
        yield _event(first)
    try:
        async for event in answer.events():
            if isinstance(event, Delta):
                yield _event(envelope.chunk(event.text))
                continue
            yield _event(envelope.last_chunk(event))
            if include_usage:
                yield _event(envelope.usage_chunk(event))
            yield b"data: [DONE]\n\n"
    except Cancelled:
        return
    except DgcompileError as error:
        # The status is long sent. OpenAI's clients raise on an event that holds an error.
        yield _event(front.api_error(error).body())


def _event(value: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(value)}\n\n".encode()


class _EventStream(StreamingResponse):
    """A stream whose answer is given up as soon as the client goes away, whether or not there is something to send.

    starlette's own notices it while it waits, or only when it sends, depending on the server's version of ASGI.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], answer: Answer) -> None:
        # The second is for nginx, which would hold events back until its buffer is full.
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(cancel_on_disconnect(receive, self._answer))
        try:
            await self.stream_response(send)
        finally:
            watcher.cancel()
            self._answer.cancel()


def _model(front: Front) -> dict[str, Any]:
    return {"id": front.model_name, "object": "model", "created": front.created, "owned_by": "dgcompile"}


def _no_route(request: Request, error: HTTPException) -> ApiError:
    """404 and 405, which the router raises."""
    what = f"{request.method} {request.url.path}"
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        message = f"{what:.200}: the method is not allowed here; expected {(error.headers or {}).get('Allow')}"
    elif error.status_code == HTTPStatus.NOT_FOUND:
        message = f"there is no {what:.200}; expected /v1/chat/completions, /v1/completions or /v1/models"
    else:
        message = str(error.detail)
    return ApiError(error.status_code, message, headers=error.headers)
