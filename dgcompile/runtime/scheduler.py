"""Continuous batching: requests share denoising steps, and come and go between them.

The batch's places are kept in three runs: ``0 .. R-1`` are being denoised, ``R .. A-1`` wait for the encoder (a prompt
that is not read yet, a canvas that is not committed yet), the rest is free. So a denoising step and an encoder call
each take one piece of the batch, and nothing is computed for rows that have no use for it. A row changes its run by
changing places with the row at the border.

Between two denoising steps, in this order: cancelled requests leave, waiting ones get the free places, and at most one
encoder call is made, of at most ``encode_chunk`` tokens a row. So a long prompt delays the running rows by one call a
step and never starves them. An encoder call has a cost that does not depend on how many rows it takes (on a GPU,
reading the weights), so it may pay to let a row wait until others join it. A call is made when nothing runs, or when

    denoising steps that the waiting rows have waited, summed over them  >=  R x encoder_overhead

where ``encoder_overhead`` is that cost in denoising steps: the waiting rows have then lost as much as the running rows
will lose by the call. It is the rule for acknowledging packets of Dooly, Goldman and Scott ("TCP dynamic acknowledgment
delay", STOC 1998), which costs at most twice what a scheduler would pay that knew the future.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from dgcompile.errors import DgcompileError, EngineError, OverloadedError, RequestError
from dgcompile.progress import Progress
from dgcompile.runtime.loop import encode_chunk
from dgcompile.runtime.row import FinishReason, Row
from dgcompile.runtime.session import Session
from dgcompile.runtime.warm_up import warm_up

CHEAP_TOKENS = 128
"""Padding of an encoder call up to this width is not worth a second call: the weights are read for it anyway."""

QUEUE_CHECK_SECONDS = 0.05
"""Between two looks at whether waiting requests were cancelled. Rows are looked at before every step."""

QUEUE_CHECK_REQUESTS = 16
"""Waiting requests that one look asks, by turns: asking may cost a message to another process."""

FAILURES_IN_A_ROW = 3
"""Failed engine calls after which the scheduler gives up: by then it is not the requests."""

RATE_SECONDS = 10.0
"""What rates are taken over."""

_log = logging.getLogger(__name__)


class JobListener(Protocol):
    """Who asked. Everything is called on the engine thread; after any number of canvases exactly one of the last three.

    An exception that one of these raises ends the request, and no other.
    """

    def is_cancelled(self) -> bool:
        """Whether nobody wants the answer any more."""

    def on_canvas(self, job: Job, token_ids: list[int]) -> bool:
        """A canvas is done: ``token_ids`` is what it added to the answer, the job's row has the rest.

        Returns:
            Whether the listener has enough: the row ends here.
        """

    def on_finish(self, job: Job, finish_reason: FinishReason) -> None:
        """The answer is complete."""

    def on_cancelled(self) -> None:
        """The request was cancelled, and its row is free."""

    def on_error(self, error: DgcompileError) -> None:
        """The engine failed, or the scheduler was closed."""


@dataclass
class Job:
    """A request on its way through the scheduler.

    Attributes:
        row: its state.
        listener: who asked.
        submitted, admitted, first_canvas: ``time.monotonic()`` of these moments, 0 before.
    """

    row: Row
    listener: JobListener
    submitted: float = 0.0
    admitted: float = 0.0
    first_canvas: float = 0.0
    # Tokens that the encoder has not read yet. Empty while the row is being denoised.
    pending: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, dtype=np.int32))


@dataclass
class Counts:
    """What a scheduler has counted since it started.

    Attributes:
        finished, failed, cancelled, refused: requests by how they ended; refused ones never got into the queue.
        steps: denoising steps, each of one or more rows.
        row_steps: rows of all those steps together.
        encoder_calls: encoder calls.
        prompt_tokens, output_tokens: tokens read and generated, without those of cancelled requests' last canvas.
        first_canvas_seconds: sum over requests of the time from submission to the first canvas.
        first_canvases: how many requests that sum is of.
    """

    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    refused: int = 0
    steps: int = 0
    row_steps: int = 0
    encoder_calls: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    first_canvas_seconds: float = 0.0
    first_canvases: int = 0


class _GivenUpError(Exception):
    """The engine failed too often; not an EngineError, which ends rows only."""

    def __init__(self, reason: EngineError) -> None:
        super().__init__(str(reason))
        self.reason = reason


def _known(error: Exception) -> DgcompileError:
    return error if isinstance(error, DgcompileError) else EngineError(f"{type(error).__name__}: {error}")


class Scheduler:
    """Runs many requests on one session. :meth:`run` belongs to one thread, the engine thread; the rest to any.

    Args:
        session: the loaded model.
        rows: rows of the batch.
        queue_limit: requests that may wait for a row.
        encoder_overhead: what an encoder call costs whatever it takes, in denoising steps; see the module.

    Attributes:
        rows: rows of the batch.
        counts: what happened so far.

    Raises:
        RequestError: an argument is out of range.
        EngineError: the memory for the batch does not suffice.
    """

    def __init__(self, session: Session, *, rows: int, queue_limit: int, encoder_overhead: float = 0.0) -> None:
        for name, value, least in (("rows", rows, 1), ("queue_limit", queue_limit, 0)):
            if value < least:
                raise RequestError(f"{name} is {value}", expected=f"at least {least}")
        if session.max_batch is not None and rows > session.max_batch:
            raise RequestError(
                f"{rows} rows were asked for",
                expected=f"at most {session.max_batch}, the bundle's max_batch",
                fix="build the bundle with a larger --max-batch",
            )
        self.rows = rows
        self.counts = Counts()
        self.encoder_overhead = encoder_overhead
        self._session = session
        self._batch = session.new_batch(rows, session.max_context)
        self._jobs: list[Job] = []  # by place; the first self._running are being denoised
        self._running = 0
        self._waited = 0  # denoising steps that rows have waited for the encoder, since its last call
        self._failures = 0
        self._queue_checked = 0.0
        self._queue_place = 0  # of the next request that is asked

        # What other threads touch, under the condition's lock.
        self._changed = threading.Condition()
        self._queue: deque[Job] = deque()
        self._queue_limit = queue_limit
        self._calls: deque[Callable[[], None]] = deque()
        self._closed = False
        self._failure: DgcompileError | None = None
        self._history: deque[tuple[float, int, int]] = deque()  # time, steps, output tokens

    def warm_up(self, progress: Progress | None = None) -> None:
        """Runs every shape once and measures ``encoder_overhead``. To be called before :meth:`run`.

        Raises:
            EngineError: the engine failed.
        """
        self.encoder_overhead = warm_up(self._session, self._batch, self.rows, progress)

    # ---- any thread

    def submit(self, row: Row, listener: JobListener) -> None:
        """Queues a request.

        Raises:
            OverloadedError: the queue is full.
            EngineError: the scheduler is closed or has given up.
        """
        job = Job(row, listener, submitted=time.monotonic())
        with self._changed:
            self._check_alive()
            # Requests that will get a free row at once do not count.
            if len(self._queue) >= self._queue_limit + self.rows - len(self._jobs):
                raise OverloadedError(
                    f"{len(self._queue)} requests are waiting for a row",
                    expected=f"at most {self._queue_limit}, the service's queue_limit",
                    fix="try again later",
                )
            self._queue.append(job)
            self._changed.notify_all()

    def call_soon(self, call: Callable[[], None]) -> None:
        """Has the engine thread call ``call`` before its next step, even if it has given up the engine.

        Raises:
            EngineError: the scheduler is closed.
        """
        with self._changed:
            self._check_open()
            self._calls.append(call)
            self._changed.notify_all()

    def count_refused(self) -> None:
        """Counts a request that was refused before it got here."""
        with self._changed:
            self.counts.refused += 1

    def close(self) -> None:
        """Makes :meth:`run` return after the step it is in; every request that is left gets ``on_error``."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def failure(self) -> DgcompileError | None:
        """Why the scheduler has given up, if it has."""
        return self._failure

    @property
    def active_rows(self) -> int:
        """Rows that hold a request."""
        return len(self._jobs)

    @property
    def queued(self) -> int:
        """Requests that wait for a row."""
        return len(self._queue)

    def rates(self) -> tuple[float, float]:
        """Denoising steps and tokens per second over the last :data:`RATE_SECONDS`."""
        now = time.monotonic()
        with self._changed:
            recent = [entry for entry in self._history if entry[0] >= now - RATE_SECONDS]
        if not recent:
            return 0.0, 0.0
        seconds = max(now - recent[0][0], 1e-3)
        return (self.counts.steps - recent[0][1]) / seconds, (self.counts.output_tokens - recent[0][2]) / seconds

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._check_open()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the service is closed")

    # ---- the engine thread

    def run(self) -> None:
        """Works until :meth:`close` is called or the engine has failed for good. Every request gets its end."""
        end: DgcompileError = EngineError("the service was closed before the answer was complete")
        try:
            while self._wait_for_work():
                self._step()
        except Exception as error:
            _log.exception("the engine is given up")
            self._failure = end = error.reason if isinstance(error, _GivenUpError) else _known(error)
            self._end_all(end)
            while self._wait_for_work():  # calls are still made, so that whoever asks can be told
                pass
        finally:
            self.close()
            self._end_all(end)

    def _wait_for_work(self) -> bool:
        """Blocks until there is something to do, then makes the calls that were asked for. False: it is closed."""
        with self._changed:
            while not (self._closed or self._queue or self._jobs or self._calls):
                self._changed.wait()
            calls, closed = list(self._calls), self._closed
            self._calls.clear()
        for call in calls:
            self._make(call)
        return not closed

    def _step(self) -> None:
        """One turn: who leaves, who comes, at most one encoder call, one denoising step."""
        self._drop_cancelled()
        self._admit()
        try:
            if self._encoder_is_due():
                self._encode()
            if self._running:
                self._denoise()
        except EngineError as error:
            self._fail_rows(error)

    def _drop_cancelled(self) -> None:
        for place in reversed(range(len(self._jobs))):
            job = self._jobs[place]
            if self._is_cancelled(job):
                self._retire(place)
                self._end_cancelled(job)
        now = time.monotonic()
        if self._queue and now - self._queue_checked >= QUEUE_CHECK_SECONDS:
            self._queue_checked = now
            with self._changed:
                first = self._queue_place % len(self._queue)
                waiting = list(itertools.islice(self._queue, first, first + QUEUE_CHECK_REQUESTS))
            self._queue_place = first + len(waiting)
            # Asked without the lock: it may take a while.
            gone = [job for job in waiting if self._is_cancelled(job)]
            with self._changed:
                for job in gone:
                    self._queue.remove(job)
            for job in gone:
                self._end_cancelled(job)

    def _admit(self) -> None:
        while len(self._jobs) < self.rows:
            with self._changed:
                if not self._queue:
                    return
                job = self._queue.popleft()
            if self._is_cancelled(job):
                self._end_cancelled(job)
                continue
            job.admitted = time.monotonic()
            job.pending = job.row.prompt
            self._batch.cache.clear_row(len(self._jobs))
            self._jobs.append(job)
            self.counts.prompt_tokens += len(job.row.prompt)

    def _encoder_is_due(self) -> bool:
        if len(self._jobs) == self._running:
            return False
        return not self._running or self._waited >= self._running * self.encoder_overhead

    def _encode(self) -> None:
        """One encoder call for all rows that wait for it; those with nothing left to read start their next canvas."""
        jobs = self._jobs[self._running :]
        # As wide as its shortest row needs, so that a long prompt does not fill the others' rows with padding; but a
        # canvas is never split, and little padding costs little.
        shortest, longest = (which(len(job.pending) for job in jobs) for which in (min, max))
        width = min(encode_chunk(self._session), longest, max(shortest, self._session.spec.canvas_length, CHEAP_TOKENS))
        parts = [job.pending[:width] for job in jobs]
        input_ids = np.zeros((len(jobs), width), dtype=np.int32)
        for line, part in zip(input_ids, parts, strict=True):
            line[: len(part)] = part
        self._session.encode(
            self._batch, input_ids, np.array([len(part) for part in parts], dtype=np.int32), self._running
        )
        self.counts.encoder_calls += 1
        self._waited = 0
        for job, part in zip(jobs, parts, strict=True):
            job.row.encoder_calls += 1
            job.pending = job.pending[len(part) :]
        for place in range(self._running, len(self._jobs)):
            if not len(self._jobs[place].pending):
                self._swap(place, self._running)
                self._batch.start_canvas(self._jobs[self._running].row.start_canvas()[None], self._running)
                self._running += 1

    def _denoise(self) -> None:
        """One denoising step of the rows that run; those whose canvas is done end or wait for the encoder."""
        batch, rows = self._batch, [job.row for job in self._jobs[: self._running]]
        for place, row in enumerate(rows):
            batch.temperature[place], batch.uniform[place], batch.noise_ids[place] = row.next_step()
            batch.entropy_bound[place] = row.config.entropy_bound
        self._session.denoise(batch, 0, self._running - 1)
        self.counts.steps += 1
        self.counts.row_steps += len(rows)
        self._waited += len(self._jobs) - len(rows)
        self._note_history()

        mean_entropy = batch.mean_entropy(len(rows))
        argmax_ids = batch.argmax_ids[: len(rows)].copy()  # places change below
        failed: list[EngineError] = []
        # From the last place on: a row that leaves changes places with one that was already looked at.
        for place in reversed(range(len(rows))):
            try:
                done = rows[place].take_step(argmax_ids[place], mean_entropy[place]) or not rows[place].steps_left
            except EngineError as error:
                self._fail(self._retire(place, wipe=True), error)
                failed.append(error)
                continue
            if done:
                self._end_canvas(place)
        if len(failed) == len(rows):
            self._count_failure(failed[0])
        else:
            self._failures = 0

    def _end_canvas(self, place: int) -> None:
        job = self._jobs[place]
        row = job.row
        token_ids = row.take_canvas()
        self.counts.output_tokens += len(token_ids)
        if not job.first_canvas:
            job.first_canvas = time.monotonic()
            self.counts.first_canvas_seconds += job.first_canvas - job.submitted
            self.counts.first_canvases += 1
        try:
            enough = job.listener.on_canvas(job, token_ids)
        except Exception as error:
            self._retire(place)
            self._fail(job, error)
            return
        if enough:
            row.finish_reason = "stop"
        reason = row.finish_reason
        if reason is None:
            job.pending = row.argmax_ids
            self._running -= 1
            self._swap(place, self._running)
            return
        self._retire(place)
        self.counts.finished += 1
        self._tell(job, lambda listener: listener.on_finish(job, reason))

    def _retire(self, place: int, *, wipe: bool = False) -> Job:
        """Frees a place; the places in use stay together."""
        job = self._jobs[place]
        if place < self._running:
            self._running -= 1
            self._swap(place, self._running)
            place = self._running
        last = len(self._jobs) - 1
        self._swap(place, last)
        self._batch.cache.clear_row(last, wipe=wipe)
        self._jobs.pop()
        return job

    def _swap(self, one: int, other: int) -> None:
        if one != other:
            self._batch.swap_rows(one, other)
            self._jobs[one], self._jobs[other] = self._jobs[other], self._jobs[one]

    # ---- ends

    def _fail_rows(self, error: EngineError) -> None:
        """An engine call failed: nobody knows whose fault it was, nor what the rows hold now."""
        _log.error("an engine call failed: %s", error)
        jobs, self._jobs, self._running, self._waited = self._jobs, [], 0, 0
        for job in jobs:
            self._fail(job, error)
        self._count_failure(error)
        for row in range(self.rows):
            self._batch.cache.clear_row(row, wipe=True)

    def _count_failure(self, error: EngineError) -> None:
        """A call from which no row got anything."""
        self._failures += 1
        if self._failures >= FAILURES_IN_A_ROW:
            raise _GivenUpError(error)

    def _end_all(self, error: DgcompileError) -> None:
        """Ends every request, and makes the calls that are left."""
        with self._changed:
            jobs, calls = [*self._jobs, *self._queue], list(self._calls)
            self._queue.clear()
            self._calls.clear()
        self._jobs, self._running = [], 0
        for call in calls:
            self._make(call)
        for job in jobs:
            self._fail(job, error)

    def _fail(self, job: Job, error: Exception) -> None:
        self.counts.failed += 1
        self._tell(job, lambda listener: listener.on_error(_known(error)))

    def _end_cancelled(self, job: Job) -> None:
        self.counts.cancelled += 1
        self._tell(job, lambda listener: listener.on_cancelled())

    def _is_cancelled(self, job: Job) -> bool:
        try:
            return job.listener.is_cancelled()
        except Exception:
            _log.exception("a listener failed: its request counts as cancelled")
            return True

    def _tell(self, job: Job, call: Callable[[JobListener], None]) -> None:
        self._make(lambda: call(job.listener))

    def _make(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            _log.exception("a listener failed")

    def _note_history(self) -> None:
        now = time.monotonic()
        if self._history and now - self._history[-1][0] < RATE_SECONDS / 50:
            return
        with self._changed:
            self._history.append((now, self.counts.steps, self.counts.output_tokens))
            while self._history[0][0] < now - 2 * RATE_SECONDS:
                self._history.popleft()
