"""Service: a loaded bundle that answers many requests at once. Every front is a thin layer over it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from dgcompile.errors import DgcompileError
from dgcompile.progress import Progress
from dgcompile.runtime.pipeline import Pipeline
from dgcompile.serving.request import GenerateRequest
from dgcompile.serving.statistics import Statistics

FinishReason = Literal["eos", "length", "stop"]
"""Why an answer ended: the model ended it, max_new_tokens was reached, or a stop string came."""

DEFAULT_ROWS = 8
"""Rows of a CPU bundle's batch, whose graphs set no limit. A GPU bundle was built for a number of rows."""

DEFAULT_QUEUE_LIMIT = 256
"""Requests that may wait for a row."""


@dataclass(frozen=True)
class Delta:
    """What one canvas added to an answer.

    Attributes:
        text: final from now on; may be empty, where it could be the start of a stop string or half a character.
        token_ids: of this canvas, cut after an EOS and at max_new_tokens.
        canvas: number of the canvas, from 0.
        steps: denoising steps that the canvas took.
    """

    text: str
    token_ids: list[int]
    canvas: int
    steps: int


@dataclass(frozen=True)
class Usage:
    """What an answer took.

    Attributes:
        prompt_tokens, output_tokens: tokens read and generated.
        steps: denoising steps, over all canvases.
        queue_ms: milliseconds from submission until it got a row.
        first_canvas_ms: milliseconds from submission to the first canvas.
        total_ms: milliseconds from submission to the end.
    """

    prompt_tokens: int
    output_tokens: int
    steps: int
    queue_ms: float
    first_canvas_ms: float
    total_ms: float


@dataclass(frozen=True)
class Completion:
    """A finished answer.

    Attributes:
        text: all of it, without special tokens, cut before a stop string; the deltas' texts joined.
        token_ids: all of them; with a stop string, up to the end of the canvas that it came in.
        finish_reason: see :data:`FinishReason`.
        seed: the one given, or the one drawn.
        usage: what it took.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    seed: int
    usage: Usage


class Listener(Protocol):
    """Who asked. All methods are called on the service's engine thread, must return at once and not raise.

    After any number of ``on_delta`` exactly one of the last three is called, and nothing after it.
    """

    def is_cancelled(self) -> bool:
        """Whether nobody wants the answer any more; asked between denoising steps."""

    def on_delta(self, delta: Delta) -> None:
        """A canvas is finished; the last one's delta too comes before ``on_finish``."""

    def on_finish(self, completion: Completion) -> None:
        """The answer is complete."""

    def on_cancelled(self) -> None:
        """``is_cancelled`` said so, and the row is free."""

    def on_error(self, error: DgcompileError) -> None:
        """The engine failed, or the service was closed."""


class Service:
    """A loaded bundle with its scheduler and its one engine thread.

    Args:
        pipeline: the loaded bundle.
        rows: requests that share a denoising step at most; None for the bundle's own, or DEFAULT_ROWS on the CPU.
        queue_limit: requests that may wait for a row.
    """

    def __init__(self, pipeline: Pipeline, *, rows: int | None = None, queue_limit: int = DEFAULT_QUEUE_LIMIT) -> None:
        raise NotImplementedError

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        rows: int | None = None,
        queue_limit: int = DEFAULT_QUEUE_LIMIT,
        threads: int | None = None,
        progress: Progress | None = None,
    ) -> Service:
        """Loads a bundle, warms it up and starts the engine thread; errors as :meth:`Pipeline.open`'s."""
        raise NotImplementedError

    @property
    def pipeline(self) -> Pipeline:
        """The loaded bundle: ``pipeline.bundle.generation`` has the defaults, ``pipeline.session.max_context`` a limit."""
        raise NotImplementedError

    def submit(self, request: GenerateRequest, listener: Listener) -> None:
        """Validates and tokenizes a request in the calling thread and queues it. Any thread may call it.

        Raises:
            RequestError: the request cannot be served as asked; found before any work is done.
            OverloadedError: the queue is full.
            EngineError: the engine thread has died, or the service is closed.
        """
        raise NotImplementedError

    def call_soon(self, call: Callable[[], None]) -> None:
        """Has the engine thread call ``call`` before its next step. Any thread may call it."""
        raise NotImplementedError

    def statistics(self) -> Statistics:
        """What happened so far. Any thread may call it."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends the engine thread: running and waiting requests get ``on_error``. Safe to call twice."""
        raise NotImplementedError
