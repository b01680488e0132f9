"""Front: what the routes of the OpenAI-compatible server share."""

from __future__ import annotations

import hashlib
import hmac
import time
from dataclasses import dataclass, field

from dgcompile.errors import DgcompileError, EngineError, RequestError
from dgcompile.serving.openai import errors
from dgcompile.serving.openai.answer import Answer
from dgcompile.serving.openai.errors import ApiError
from dgcompile.serving.openai.schema import Request, parse_request
from dgcompile.serving.service import Service
from dgcompile.serving.statistics import Statistics

DEFAULT_MAX_REQUEST_BYTES = 4 << 20
"""Of a body: token ids for the published model's whole context of 262,144 tokens take 2 MB as JSON."""


@dataclass
class Front:
    """A served model.

    Attributes:
        model_name: what requests call the model.
        api_key: what they must bear; None lets everybody in.
        max_request_bytes: most bytes of a body.
        service: the loaded bundle; None while it is being loaded.
        closing: the server is being stopped and takes no new requests.
        created: when the model was put up, in seconds since 1970.
    """

    model_name: str
    api_key: str | None = None
    max_request_bytes: int = DEFAULT_MAX_REQUEST_BYTES
    service: Service | None = None
    closing: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def check_key(self, authorization: str | None) -> None:
        """Lets a request in, or not.

        Args:
            authorization: the header.

        Raises:
            ApiError: 401, no key or a wrong one.
        """
        if self.api_key is None:
            return
        scheme, _, given = (authorization or "").partition(" ")
        # Of equal length and compared in constant time: how long an answer takes says nothing about the key.
        matches = hmac.compare_digest(_digest(given.strip()), _digest(self.api_key))
        if scheme.lower() != "bearer" or not matches:
            raise ApiError(
                401,
                "wrong API key; expected the header 'Authorization: Bearer KEY' with the server's key",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def check_model(self, name: str) -> None:
        """Raises ApiError 404 for another model than the served one."""
        if name != self.model_name:
            raise ApiError(
                404,
                f"there is no model {name!r:.200} here; expected {self.model_name!r}",
                param="model",
                code="model_not_found",
            )

    def check_ready(self) -> Service:
        """The service.

        Raises:
            ApiError: 503, it is being loaded or stopped, or its engine has given up.
        """
        if self.closing:
            raise errors.closing()
        if self.service is None:
            raise errors.unavailable("the model is being loaded; ask again later", "loading")
        self.check_engine()
        return self.service

    def check_engine(self) -> None:
        """Raises ApiError 503 if the engine has given up: only a new process helps then."""
        failure = None if self.service is None else self.service.failure
        if failure is not None:
            raise errors.unavailable(f"the engine has given up: {failure}; start the server again", "engine_failed")

    def submit(self, body: bytes, schema: type[Request], answer: Answer) -> Request:
        """Validates a request and queues it. Takes as long as its tokenization: not for the event loop's thread.

        Raises:
            ApiError, RequestError: it cannot be served as asked.
            OverloadedError: the queue is full.
            EngineError: the engine has given up, or the service is closed.
        """
        service = self.check_ready()
        try:
            request = parse_request(body, schema)
            self.check_model(request.model)
            generate_request = request.generate_request(service.pipeline.bundle.generation)
        except (ApiError, RequestError):
            service.count_refused()
            raise
        service.submit(generate_request, answer)
        return request

    def api_error(self, error: DgcompileError) -> ApiError:
        """What a client is told of one of our errors."""
        if self.closing and isinstance(error, EngineError):
            return errors.closing()
        return errors.from_error(error)

    def statistics(self) -> Statistics | None:
        """What the service counted; None while it is being loaded."""
        return None if self.service is None else self.service.statistics()


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
