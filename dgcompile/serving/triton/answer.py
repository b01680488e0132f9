"""An answer on its way back through Triton. All of it happens on the engine thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dgcompile.errors import DgcompileError, OverloadedError, RequestError
from dgcompile.serving.service import Completion, Delta
from dgcompile.serving.triton.backend import ResponseSender, pb_utils, tensor

CANCEL_CHECK_SECONDS = 0.016
"""Between two questions to Triton whether a request was cancelled. One took 30 to 70 us (a message to the server's
process and back, Triton 2.51 on a 2-core AMD EPYC): 8 rows take some 2.5 % of the engine thread's time at most."""


class Answer:
    """Sends what one request gets; the service's listener.

    Args:
        sender: Triton's, for the request.
        stream: a response for each canvas, or one for all.
        call_soon: has the engine thread call something before its next step.
    """

    def __init__(
        self,
        sender: ResponseSender,
        *,
        stream: bool,
        call_soon: Callable[[Callable[[], None]], None],
    ) -> None:
        self._sender = sender
        self._stream = stream
        self._call_soon = call_soon
        self._next_check = 0.0
        self._delta: Delta | None = None

    def is_cancelled(self) -> bool:
        """Whether the client is gone: it closed its stream or its connection, or its deadline passed."""
        now = time.monotonic()
        if now < self._next_check:
            return False
        self._next_check = now + CANCEL_CHECK_SECONDS
        return self._sender.is_cancelled()

    def on_delta(self, delta: Delta) -> None:
        """Sends the canvas of a stream; the last one goes with what :meth:`on_finish` tells, in one response."""
        if self._stream:
            self._delta = delta
            self._call_soon(self._send_delta)

    def _send_delta(self) -> None:
        delta, self._delta = self._delta, None
        if delta is not None:
            self._sender.send(pb_utils().InferenceResponse(_text_tensors(delta.text, delta.token_ids)))

    def on_finish(self, completion: Completion) -> None:
        """Sends the last response, or the only one."""
        text, token_ids = completion.text, completion.token_ids
        if self._stream:
            delta, self._delta = self._delta, None
            text, token_ids = (delta.text, delta.token_ids) if delta is not None else ("", [])
        self._end([*_text_tensors(text, token_ids), *_usage_tensors(completion)])

    def on_cancelled(self) -> None:
        """Nobody listens any more."""
        self._end(error=pb_utils().TritonError("the request was cancelled", pb_utils().TritonError.CANCELLED))

    def on_error(self, error: DgcompileError) -> None:
        """The engine failed, the service was closed, or the request is refused."""
        self._end(error=_triton_error(error))

    def _end(self, tensors: Sequence[Any] = (), error: Any = None) -> None:
        self._delta = None
        response = pb_utils().InferenceResponse(list(tensors), **({"error": error} if error is not None else {}))
        # With the response and not after it: a /generate that gets two is an error.
        self._sender.send(response, flags=pb_utils().TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def _text_tensors(text: str, token_ids: Sequence[int]) -> list[Any]:
    return [tensor("TEXT", [text.encode()], np.object_), tensor("TOKEN_IDS", token_ids, np.int64)]


def _usage_tensors(completion: Completion) -> list[Any]:
    usage = completion.usage
    return [
        tensor("FINISH_REASON", [completion.finish_reason.encode()], np.object_),
        tensor("PROMPT_TOKENS", [usage.prompt_tokens], np.int64),
        tensor("OUTPUT_TOKENS", [usage.output_tokens], np.int64),
        tensor("DENOISING_STEPS", [usage.steps], np.int64),
        tensor("QUEUE_MS", [usage.queue_ms], np.float64),
        tensor("FIRST_CANVAS_MS", [usage.first_canvas_ms], np.float64),
        tensor("TOTAL_MS", [usage.total_ms], np.float64),
        tensor("SEED", [completion.seed], np.uint64),
    ]


def _triton_error(error: DgcompileError) -> Any:
    """Its kind is for servers that tell; the generate endpoints of Triton 2.51 make 400 of any."""
    kinds = pb_utils().TritonError
    if isinstance(error, RequestError):
        return kinds(str(error), kinds.INVALID_ARG)
    if isinstance(error, OverloadedError):
        return kinds(str(error), kinds.UNAVAILABLE)
    return kinds(str(error), kinds.INTERNAL)
