"""Keeps a service's batch full with lines, and writes what comes back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol

from dgcompile.errors import DgcompileError, EngineError, OverloadedError, RequestError
from dgcompile.progress import Advance
from dgcompile.serving.bulk.lines import Line
from dgcompile.serving.bulk.output import RecordFile
from dgcompile.serving.bulk.records import BulkOptions, LineId, answer_record, error_record, make_request, parse_line
from dgcompile.serving.request import GenerateRequest
from dgcompile.serving.service import Completion, Delta, Service

WINDOW = 256
"""Lines beyond the batch's rows that are asked, or wait for an earlier line, at a time. It bounds the memory; one line
may take about WINDOW / rows times as long as the others before rows run empty behind it."""

GO_ON = "run the same command again: it goes on after the lines that are done"


class Feed:
    """Lines in, records out. All methods are called from one thread; the service's engine thread only queues answers.

    Args:
        service: answers; nobody else uses it.
        answers, errors: where records go.
        options: how to answer.
        advance: told of every line that is done.

    Attributes:
        answered, bad: lines that were.
        output_tokens: of the answers.
    """

    def __init__(
        self, service: Service, answers: RecordFile, errors: RecordFile, options: BulkOptions, advance: Advance
    ) -> None:
        self.answered = self.bad = self.output_tokens = 0
        self._service = service
        self._answers = answers
        self._errors = errors
        self._options = options
        self._advance = advance
        self._arrived: SimpleQueue[_Arrival] = SimpleQueue()
        self._release: _Release = _InOrder() if options.ordered else _AtOnce()
        self._limit = service.statistics().rows + WINDOW

    def take(self, line: Line) -> None:
        """Submits a line, or writes why it is bad. Waits while too many lines are on their way.

        Raises:
            EngineError: the engine failed.
            OSError: a record could not be written.
        """
        line_id: LineId = None
        try:
            line_id, values = parse_line(line)
            request = make_request(line.number, values, self._options)
            self._submit(request, _Answer(line.number, line_id, self._arrived))
        except RequestError as error:
            self._errors.write(error_record(line.number, line_id, error))
            self.bad += 1
            self._advance()
        while len(self._release) >= self._limit:
            self._write(self._arrived.get())
        try:
            while True:
                self._write(self._arrived.get_nowait())
        except Empty:
            pass

    def drain(self) -> None:
        """Waits for all lines that are on their way; errors as :meth:`take`'s."""
        while len(self._release):
            self._write(self._arrived.get())

    def _submit(self, request: GenerateRequest, answer: _Answer) -> None:
        while True:
            try:
                self._service.submit(request, answer)
            except OverloadedError:
                # The service's queue is shorter than our window.
                self._write(self._arrived.get())
            except EngineError as error:
                raise EngineError(error.problem, expected=error.expected, fix=GO_ON) from error
            else:
                break
        self._release.start(answer.number)

    def _write(self, arrival: _Arrival) -> None:
        """Writes the records that an answer lets out."""
        answer, outcome = arrival.answer, arrival.outcome
        if isinstance(outcome, DgcompileError):
            raise EngineError(outcome.problem, expected=outcome.expected, fix=GO_ON) from outcome
        record = _Done(answer_record(answer.number, answer.line_id, outcome, self._options), len(outcome.token_ids))
        for done in self._release.finish(answer.number, record):
            self._answers.write(done.record)
            self.answered += 1
            self.output_tokens += done.output_tokens
            self._advance()


@dataclass(frozen=True)
class _Arrival:
    answer: _Answer
    outcome: Completion | DgcompileError


@dataclass(frozen=True)
class _Done:
    record: bytes
    output_tokens: int


class _Answer:
    """The listener of one line."""

    def __init__(self, number: int, line_id: LineId, arrived: SimpleQueue[_Arrival]) -> None:
        self.number = number
        self.line_id = line_id
        self._arrived = arrived

    def is_cancelled(self) -> bool:
        return False  # an interrupted run closes the service

    def on_delta(self, delta: Delta) -> None:
        del delta

    def on_finish(self, completion: Completion) -> None:
        self._arrived.put(_Arrival(self, completion))

    def on_cancelled(self) -> None:
        self.on_error(EngineError(f"line {self.number} was cancelled, which nobody asked for"))

    def on_error(self, error: DgcompileError) -> None:
        self._arrived.put(_Arrival(self, error))


class _Release(Protocol):
    """When answers may be written. Its length is the number of lines that were started and not let out."""

    def __len__(self) -> int: ...

    def start(self, number: int) -> None:
        """A line was submitted; numbers ascend."""

    def finish(self, number: int, done: _Done) -> Iterator[_Done]:
        """A line was answered; gives what may be written now."""


class _AtOnce:
    """Every answer as it comes."""

    def __init__(self) -> None:
        self._started = 0

    def __len__(self) -> int:
        return self._started

    def start(self, number: int) -> None:
        del number
        self._started += 1

    def finish(self, number: int, done: _Done) -> Iterator[_Done]:
        del number
        self._started -= 1
        yield done


class _InOrder:
    """Every answer after those of all lines before it."""

    def __init__(self) -> None:
        self._started: deque[int] = deque()
        self._finished: dict[int, _Done] = {}

    def __len__(self) -> int:
        return len(self._started)

    def start(self, number: int) -> None:
        self._started.append(number)

    def finish(self, number: int, done: _Done) -> Iterator[_Done]:
        self._finished[number] = done
        while self._started and self._started[0] in self._finished:
            yield self._finished.pop(self._started.popleft())
