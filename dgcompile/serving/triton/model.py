"""The model that Triton's python backend runs: a thin layer over the service.

``execute`` only validates and queues. Everything that sends a response, asks for a cancellation or ends a request
happens on the service's one engine thread: responses from more than one thread crash the server (seen with 2.51).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dgcompile.errors import BundleError, DgcompileError, EngineError, RequestError
from dgcompile.serving.service import DEFAULT_QUEUE_LIMIT, Service
from dgcompile.serving.triton.answer import Answer
from dgcompile.serving.triton.backend import InferenceRequest, pb_utils
from dgcompile.serving.triton.inputs import in_tritons_words, read_request
from dgcompile.serving.triton.metrics import TritonMetrics
from dgcompile.serving.triton.parameters import Parameters


class TritonPythonModel:
    """What Triton calls. One instance, one loaded bundle, one batch that all requests share."""

    def initialize(self, args: dict[str, str]) -> None:
        """Loads the bundle that the configuration names and warms it up; the model is ready when this returns.

        Raises:
            TritonModelException: the parameters are malformed, or the bundle cannot be loaded; says why.
        """
        try:
            config = json.loads(args["model_config"])
            parameters = Parameters.from_config(
                {key: value["string_value"] for key, value in config.get("parameters", {}).items()}
            )
            folder = Path(args["model_repository"]) / args["model_version"]
            self._service = Service.open(
                folder / parameters.bundle,  # an absolute one stands for itself
                rows=parameters.rows,
                queue_limit=DEFAULT_QUEUE_LIMIT if parameters.queue_limit is None else parameters.queue_limit,
                threads=parameters.threads,
            )
        except DgcompileError as error:
            raise pb_utils().TritonModelException(_for_operators(error)) from error
        labels = {"model": args["model_name"], "version": args["model_version"]}
        self._metrics = TritonMetrics(self._service, labels)

    def execute(self, requests: Sequence[InferenceRequest]) -> None:
        """Validates requests and queues them; each is answered later.

        Raises:
            TritonModelException: the service is closed. Triton then refuses the request itself: there is no engine
                thread any more that could.
        """
        for request in requests:
            self._take(request)

    def finalize(self) -> None:
        """Ends both threads. Requests that are not answered yet get an error."""
        self._metrics.close()
        self._service.close()

    def _take(self, request: InferenceRequest) -> None:
        sender = request.get_response_sender()
        error = self._submit(request, sender)
        if error is None:
            return
        answer = self._answer(sender, stream=False)
        try:
            self._service.call_soon(lambda: answer.on_error(error))
        except EngineError as closed:
            raise pb_utils().TritonModelException(str(closed)) from closed

    def _submit(self, request: InferenceRequest, sender: Any) -> DgcompileError | None:
        """Queues a request, or says why not."""
        if self._service.failure is not None:
            return self._service.failure  # first, so that an empty request tells whether the engine lives
        try:
            incoming = read_request(request, self._service.pipeline.session.max_context)
        except RequestError as error:
            self._service.count_refused()
            return error
        try:
            self._service.submit(incoming.request, self._answer(sender, stream=incoming.stream))
        except RequestError as error:
            return in_tritons_words(error)
        except DgcompileError as error:
            return error
        return None

    def _answer(self, sender: Any, *, stream: bool) -> Answer:
        return Answer(sender, stream=stream, call_soon=self._service.call_soon)


def _for_operators(error: DgcompileError) -> str:
    """The message; where the bundle was not found, also what containers get wrong."""
    if isinstance(error, BundleError) and "there is no such folder" in error.problem:
        return f"{error}. In a container, mount it there, or write the repository with --bundle-path or --copy"
    return str(error)
