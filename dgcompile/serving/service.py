"""Service: a loaded bundle that answers many requests at once. Every front is a thin layer over it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from dgcompile.errors import DgcompileError, OverloadedError, RequestError
from dgcompile.progress import Progress
from dgcompile.runtime.pipeline import Pipeline
from dgcompile.runtime.row import FinishReason, Row
from dgcompile.runtime.scheduler import Job, Scheduler
from dgcompile.runtime.tokenizer import Tokenizer
from dgcompile.serving.request import GenerateRequest, new_seed
from dgcompile.serving.statistics import Statistics
from dgcompile.serving.text_stream import TextStream

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
        finish_reason: see :data:`dgcompile.runtime.row.FinishReason`.
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
        pipeline: the loaded bundle. Nobody else may use its session as long as the service lives.
        rows: requests that share a denoising step at most; None for the bundle's own, or DEFAULT_ROWS on the CPU.
        queue_limit: requests that may wait for a row.
        progress: told how far the warm-up got.

    Raises:
        RequestError: more rows than the bundle has, or a limit that is out of range.
        EngineError: the engine failed in the warm-up, or the memory for the batch does not suffice.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        rows: int | None = None,
        queue_limit: int = DEFAULT_QUEUE_LIMIT,
        progress: Progress | None = None,
    ) -> None:
        self._pipeline = pipeline
        tokenizer = pipeline.tokenizer
        self._max_characters = 0 if tokenizer is None else pipeline.session.max_context * tokenizer.longest_token
        if rows is None:
            rows = pipeline.session.max_batch or DEFAULT_ROWS
        self._scheduler = Scheduler(pipeline.session, rows=rows, queue_limit=queue_limit)
        self._scheduler.warm_up(progress)
        # A daemon, so that an exception elsewhere does not leave a process that waits for ever.
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dgcompile-engine", daemon=True)
        self._thread.start()

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
        """Loads a bundle, warms it up and starts the engine thread; errors as :meth:`Pipeline.open`'s and above."""
        pipeline = Pipeline.open(path, threads, progress=progress)
        return cls(pipeline, rows=rows, queue_limit=queue_limit, progress=progress)

    @property
    def pipeline(self) -> Pipeline:
        """The loaded bundle: ``bundle.generation`` has the defaults, ``session.max_context`` a limit."""
        return self._pipeline

    @property
    def rows(self) -> int:
        """Rows of the batch."""
        return self._scheduler.rows

    @property
    def failure(self) -> DgcompileError | None:
        """Why the engine has given up, if it has: the service is of no use then."""
        return self._scheduler.failure

    def submit(self, request: GenerateRequest, listener: Listener) -> None:
        """Validates and tokenizes a request in the calling thread and queues it. Any thread may call it.

        Raises:
            RequestError: the request cannot be served as asked; found before any work is done.
            OverloadedError: the queue is full.
            EngineError: the engine has given up, or the service is closed.
        """
        try:
            seed = new_seed() if request.seed is None else request.seed
            answer = _Answer(self._pipeline.tokenizer, request.stop, seed, listener)
            self._check_characters(request)
            session = self._pipeline.session
            config = request.generation(self._pipeline.bundle.generation)
            row = Row(session.spec, session.max_context, request.token_ids(self._pipeline), config, seed)
            self._scheduler.submit(row, answer)
        except (RequestError, OverloadedError):
            self._scheduler.count_refused()
            raise

    def _check_characters(self, request: GenerateRequest) -> None:
        """Refuses what cannot fit before it is tokenized: that takes seconds for a few megabytes."""
        if request.characters > self._max_characters > 0:
            raise RequestError(
                f"the prompt has {request.characters} characters",
                expected=f"at most {self._max_characters}: more do not fit the bundle's max_context",
                fix="shorten the prompt, or build the bundle with a larger --max-context",
            )

    def count_refused(self) -> None:
        """Counts a request that a front refused before it became a :class:`GenerateRequest`."""
        self._scheduler.count_refused()

    def call_soon(self, call: Callable[[], None]) -> None:
        """Has the engine thread call ``call`` before its next step. Any thread may call it.

        Raises:
            EngineError: the engine has given up, or the service is closed.
        """
        self._scheduler.call_soon(call)

    def statistics(self) -> Statistics:
        """What happened so far. Any thread may call it."""
        scheduler = self._scheduler
        steps_per_second, tokens_per_second = scheduler.rates()
        return Statistics(
            rows=scheduler.rows,
            active_rows=scheduler.active_rows,
            queued=scheduler.queued,
            **asdict(scheduler.counts),
            steps_per_second=steps_per_second,
            tokens_per_second=tokens_per_second,
        )

    def close(self) -> None:
        """Ends the engine thread: running and waiting requests get ``on_error``. Safe to call twice, by any thread."""
        self._scheduler.close()
        if threading.current_thread() is not self._thread:
            # Not join(): interrupted by Ctrl-C, it takes a living thread for one that has ended (CPython gh-90882).
            self._ended.wait()

    def _run(self) -> None:
        try:
            self._scheduler.run()
        finally:
            self._ended.set()


class _Answer:
    """Between the scheduler and who asked: token ids become text, and stop strings are found."""

    def __init__(self, tokenizer: Tokenizer | None, stop: Sequence[str], seed: int, listener: Listener) -> None:
        if stop and tokenizer is None:
            raise RequestError("stop was given, but the bundle has no tokenizer", expected="no stop strings")
        self._text = None if tokenizer is None else TextStream(tokenizer, stop)
        self._seed = seed
        self._listener = listener

    def is_cancelled(self) -> bool:
        return self._listener.is_cancelled()

    def on_canvas(self, job: Job, token_ids: list[int]) -> bool:
        row, text, stopped = job.row, "", False
        if self._text is not None:
            text = self._text.add(token_ids, last=row.finish_reason is not None)
            stopped = self._text.stopped
        self._listener.on_delta(Delta(text, token_ids, row.canvas, row.steps_per_canvas[-1]))
        return stopped

    def on_finish(self, job: Job, finish_reason: FinishReason) -> None:
        row, now = job.row, time.monotonic()
        usage = Usage(
            prompt_tokens=len(row.prompt),
            output_tokens=len(row.token_ids),
            steps=row.steps,
            queue_ms=1e3 * (job.admitted - job.submitted),
            first_canvas_ms=1e3 * (job.first_canvas - job.submitted),
            total_ms=1e3 * (now - job.submitted),
        )
        text = self._text.text if self._text is not None else ""
        self._listener.on_finish(Completion(text, row.token_ids, finish_reason, self._seed, usage))

    def on_cancelled(self) -> None:
        self._listener.on_cancelled()

    def on_error(self, error: DgcompileError) -> None:
        self._listener.on_error(error)
