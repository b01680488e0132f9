"""When the encoder and the denoiser were called during one ``generate()``, and what that says."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

Kind = Literal["encode", "encoded", "denoise"]


class Event(NamedTuple):
    """A call of the encoder, its end, or a call of the denoiser, with its time in seconds."""

    kind: Kind
    at: float


class Run(BaseModel):
    """One ``generate()``, in seconds.

    Attributes:
        seconds: all of it.
        prompt_seconds: in the encoder calls on the prompt.
        commit_seconds: each later encoder call, of a finished canvas.
        step_seconds: by canvas, the times from one call of the denoiser to the next one, so with the sampler and the
            loop. The last step of a canvas has no next one and is left out: a canvas of S steps has S - 1 times.
        tokens: how many came out.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    seconds: float
    prompt_seconds: float
    commit_seconds: tuple[float, ...]
    step_seconds: tuple[tuple[float, ...], ...]
    tokens: int

    @property
    def steps_per_canvas(self) -> list[int]:
        """Calls of the denoiser in each canvas."""
        return [len(times) + 1 for times in self.step_seconds]

    @property
    def first_canvas_step(self) -> float:
        """Median step of the first canvas: that at a past of the prompt's length."""
        return statistics.median(self.step_seconds[0])


class Stamps:
    """Takes the times while one ``generate()`` runs."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._started = time.perf_counter()

    def start(self) -> None:
        """Forgets what was and starts the clock."""
        self._events.clear()
        self._started = time.perf_counter()

    @contextmanager
    def encoding(self) -> Iterator[None]:
        """Around a call of the encoder."""
        self._events.append(Event("encode", time.perf_counter()))
        yield
        self._events.append(Event("encoded", time.perf_counter()))

    def denoising(self) -> None:
        """Before a call of the denoiser."""
        self._events.append(Event("denoise", time.perf_counter()))

    @property
    def step_seconds(self) -> list[float]:
        """Times between the calls of the denoiser so far, in the newest canvas."""
        return list(canvases_of(self._events)[-1]) if any(event.kind == "denoise" for event in self._events) else []

    def finish(self, tokens: int) -> Run:
        """The run that began with :meth:`start`."""
        seconds = time.perf_counter() - self._started
        return run_of(self._events, seconds, tokens)


def run_of(events: Sequence[Event], seconds: float, tokens: int) -> Run:
    """What the events of one ``generate()`` say."""
    first_step = next(index for index, event in enumerate(events) if event.kind == "denoise")
    calls = [
        (index, end.at - start.at)
        for index, (start, end) in enumerate(itertools.pairwise(events))
        if start.kind == "encode"
    ]
    return Run(
        seconds=seconds,
        prompt_seconds=sum(taken for index, taken in calls if index < first_step),
        commit_seconds=tuple(taken for index, taken in calls if index > first_step),
        step_seconds=tuple(canvases_of(events)),
        tokens=tokens,
    )


def canvases_of(events: Sequence[Event]) -> list[tuple[float, ...]]:
    """By canvas, the times between successive calls of the denoiser. An encoder call ends a canvas."""
    canvases: list[list[float]] = []
    fresh = True
    for event in events:
        if event.kind != "denoise":
            fresh = True
            continue
        if fresh:
            canvases.append([])
            fresh = False
        canvases[-1].append(event.at)
    return [tuple(later - earlier for earlier, later in itertools.pairwise(times)) for times in canvases]


def run_from(values: Any) -> Run:
    """A run as a worker sent it."""
    return Run.model_validate(values)
