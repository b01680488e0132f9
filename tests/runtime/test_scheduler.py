"""Continuous batching against the toy model, whose right answers are known for each row alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgcompile.errors import DgcompileError, EngineError, OverloadedError, RequestError
from dgcompile.generation_config import GenerationConfig
from dgcompile.runtime.loop import CPU_ENCODE_CHUNK, generate
from dgcompile.runtime.onnxruntime_session import OnnxRuntimeSession
from dgcompile.runtime.row import FinishReason, Row
from dgcompile.runtime.scheduler import CHEAP_TOKENS, FAILURES_IN_A_ROW, Job, Scheduler
from dgcompile.runtime.session import Batch, Session
from tests.runtime.test_loop import CONFIG, WatchedSession, expected, summary
from tests.runtime.toy_model import CANVAS, VOCAB, toy_spec


@dataclass
class Request:
    """What a client asks, and everything it is told."""

    prompt: Sequence[int]
    config: GenerationConfig = CONFIG
    seed: int = 0
    cancel_after: int | None = None  # times that it says that it still waits
    enough_after: int | None = None  # canvases
    canvases: list[list[int]] = field(default_factory=list)
    ends: list[Any] = field(default_factory=list)
    asked: int = 0
    steps: list[int] = field(default_factory=list)
    after_end: Callable[[], None] = lambda: None

    def is_cancelled(self) -> bool:
        self.asked += 1
        return self.cancel_after is not None and self.asked > self.cancel_after

    def on_canvas(self, job: Job, token_ids: list[int]) -> bool:
        assert not self.ends
        self.canvases.append(token_ids)
        return self.enough_after is not None and len(self.canvases) >= self.enough_after

    def on_finish(self, job: Job, finish_reason: FinishReason) -> None:
        self.steps = job.row.steps_per_canvas
        assert self.token_ids == job.row.token_ids
        assert job.submitted <= job.admitted <= job.first_canvas
        self._end(finish_reason)

    def on_cancelled(self) -> None:
        self._end("cancelled")

    def on_error(self, error: DgcompileError) -> None:
        self._end(error)

    def _end(self, end: Any) -> None:
        self.ends.append(end)
        self.after_end()

    @property
    def token_ids(self) -> list[int]:
        return list(chain.from_iterable(self.canvases))

    @property
    def answer(self) -> tuple[list[int], str, list[int]]:
        return self.token_ids, self.ends[0], self.steps

    def submit(self, scheduler: Scheduler, session: Session) -> None:
        scheduler.submit(Row(session.spec, session.max_context, self.prompt, self.config, self.seed), self)


class ArrivalSession(WatchedSession):
    """A real session in which a number of denoising steps passes before each request arrives."""

    def __init__(self, session: Session, arrivals: Sequence[tuple[int, Request]]) -> None:
        super().__init__(session)
        self.arrivals = sorted(arrivals, key=lambda arrival: arrival[0])
        self.scheduler: Scheduler | None = None
        self.log: list[str] = []

    def encode(
        self, batch: Batch, input_ids: npt.NDArray[np.int32], input_length: npt.NDArray[np.int32], first: int = 0
    ) -> None:
        self.log.append(f"encode {first}-{first + len(input_ids) - 1} {input_ids.shape[1]}")
        super().encode(batch, input_ids, input_length, first)

    def denoise(self, batch: Batch, first: int, last: int) -> None:
        self.log.append(f"step {first}-{last}")
        super().denoise(batch, first, last)
        self.arrive(len(self.steps))

    def arrive(self, steps: int) -> None:
        """Submits whoever arrives by then."""
        assert self.scheduler is not None
        while self.arrivals and self.arrivals[0][0] <= steps:
            _, request = self.arrivals.pop(0)
            request.submit(self.scheduler, self.session)


def run(session: ArrivalSession, rows: int = 3, overhead: float = 0.0) -> Scheduler:
    """Serves a session's requests in this thread; returns when all of them have ended."""
    requests = [request for _, request in session.arrivals]
    scheduler = Scheduler(session, rows=rows, queue_limit=len(requests), encoder_overhead=overhead)
    session.scheduler = scheduler

    def ended() -> None:
        if all(request.ends for request in requests):
            scheduler.close()
        elif session.arrivals and not scheduler.active_rows and not scheduler.queued:
            session.arrive(session.arrivals[0][0])

    for request in requests:
        request.after_end = ended
    session.arrive(session.arrivals[0][0])
    scheduler.run()
    assert all(len(request.ends) == 1 for request in requests)
    return scheduler


def serve(
    session: OnnxRuntimeSession, arrivals: Sequence[tuple[int, Request]], rows: int = 3, overhead: float = 0.0
) -> tuple[Scheduler, ArrivalSession]:
    """Serves requests, each of which arrives after a number of denoising steps."""
    watched = ArrivalSession(session, arrivals)
    return run(watched, rows, overhead), watched


REQUESTS = st.builds(
    Request,
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40),
    config=st.builds(
        CONFIG.replace,
        max_new_tokens=st.integers(1, 4 * CANVAS),
        max_denoising_steps=st.integers(1, 9),
        stability_threshold=st.sampled_from([None, 0, 1, 2]),
        confidence_threshold=st.sampled_from([0.01, 100.0]),
        eos_token_ids=st.sampled_from([(), (3,), (3, 17, 30)]),
        entropy_bound=st.sampled_from([0.0001, 0.1, 2.0]),
    ),
    seed=st.integers(0, 2**64 - 1),
    cancel_after=st.sampled_from([None, None, None, 0, 1, 2, 5, 9]),
    enough_after=st.sampled_from([None, None, 1, 2]),
)


@settings(max_examples=120, deadline=None)
@given(
    arrivals=st.lists(st.tuples(st.integers(0, 30), REQUESTS), min_size=1, max_size=8),
    rows=st.integers(1, 4),
    overhead=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
)
def test_a_row_gets_what_it_gets_alone(
    toy_session: OnnxRuntimeSession, arrivals: list[tuple[int, Request]], rows: int, overhead: float
) -> None:
    """Whenever requests arrive, whatever their lengths, seeds and options, whoever else is cancelled."""
    scheduler, _ = serve(toy_session, arrivals, rows, overhead)
    counts = scheduler.counts
    for _, request in arrivals:
        ids, reason, steps = expected(request.prompt, request.config, request.seed)
        if request.ends[0] == "cancelled":
            assert request.cancel_after is not None
            assert request.token_ids == ids[: CANVAS * len(request.canvases)]
            continue
        if request.ends[0] == "stop":
            assert len(request.canvases) == request.enough_after
            assert request.token_ids == ids[: CANVAS * len(request.canvases)]
            continue
        assert request.answer == (ids, reason, steps)
    ends = [request.ends[0] for _, request in arrivals]
    assert counts.cancelled == ends.count("cancelled")
    assert counts.finished == len(ends) - counts.cancelled
    assert (counts.failed, counts.refused) == (0, 0)
    assert counts.output_tokens == sum(len(ids) for _, request in arrivals for ids in request.canvases)
    assert scheduler.active_rows == scheduler.queued == 0


def test_nothing_is_computed_for_rows_that_have_no_use_for_it(toy_session: OnnxRuntimeSession) -> None:
    """Each denoising step takes exactly the rows that are being denoised, each encoder call those that wait."""
    requests = [Request([index + 1] * (3 + index), seed=index) for index in range(5)]
    scheduler, watched = serve(toy_session, [(0, request) for request in requests], rows=3)
    assert scheduler.counts.row_steps == sum(sum(request.steps) for request in requests)
    assert sum(last - first + 1 for first, last, _ in watched.steps) == scheduler.counts.row_steps
    assert all(first == 0 for first, _, _ in watched.steps)
    read = sum(len(row) for call in watched.encoded for row in call)
    committed = sum(CANVAS * (len(request.canvases) - 1) for request in requests)
    assert read == sum(len(request.prompt) for request in requests) + committed


def test_a_new_row_starts_between_two_steps_of_the_others(toy_session: OnnxRuntimeSession) -> None:
    """It does not wait for a canvas, let alone an answer, of theirs."""
    long = Request([1, 2, 3], CONFIG.replace(max_new_tokens=CANVAS, stability_threshold=None))
    short = Request([4], CONFIG.replace(max_new_tokens=1, max_denoising_steps=3, stability_threshold=None))
    _, watched = serve(toy_session, [(0, long), (2, short)])
    assert watched.log == ["encode 0-0 3", *["step 0-0"] * 2, "encode 1-1 1", *["step 0-1"] * 3, *["step 0-0"] * 4]


def test_a_long_prompt_is_read_between_the_steps_of_others(toy_folder: Path) -> None:
    """One encoder call of at most encode_chunk tokens between two steps, so that nobody starves."""
    session = OnnxRuntimeSession(toy_folder, toy_spec(), max_context=4096, threads=1)
    running = Request([1, 2], CONFIG.replace(max_new_tokens=CANVAS, stability_threshold=None))
    prompt = [int(token) for token in np.random.default_rng(3).integers(0, VOCAB, 3 * CPU_ENCODE_CHUNK + 7)]
    long = Request(prompt, CONFIG.replace(max_new_tokens=CANVAS))
    _, watched = serve(session, [(0, running), (3, long)], rows=2)
    chunks = [f"encode 1-1 {size}" for size in (*[CPU_ENCODE_CHUNK] * 3, 7)]
    assert watched.log[1:12] == [
        *["step 0-0"] * 3,
        *chain.from_iterable((chunk, "step 0-0") for chunk in chunks[:3]),
        chunks[3],
        "step 0-1",
    ]
    # The toy's sums are exact for short prompts only, but the same whoever makes them.
    assert long.answer == summary(generate(session, [prompt], long.config, [0])[0])
    assert running.answer == expected(running.prompt, running.config, 0)


def test_a_short_prompt_is_not_filled_up_beside_a_long_one(toy_folder: Path) -> None:
    """A call is as wide as its shortest row needs, but for padding that costs next to nothing."""
    session = OnnxRuntimeSession(toy_folder, toy_spec(), max_context=4096, threads=1)
    config = CONFIG.replace(max_new_tokens=CANVAS)
    short, long = Request([5], config), Request([7] * 1000, config)
    _, watched = serve(session, [(0, short), (0, long)], rows=2)
    assert watched.log[0] == f"encode 0-1 {CHEAP_TOKENS}"
    assert [short.answer, long.answer] == [expected(request.prompt, config, 0) for request in (short, long)]


@pytest.mark.parametrize(("overhead", "waits"), [(0.0, 0), (0.5, 1), (1.0, 2), (1.6, 4)])
def test_a_row_waits_for_the_encoder_as_long_as_that_pays(
    toy_session: OnnxRuntimeSession, overhead: float, waits: int
) -> None:
    """Until it has lost as many steps as the call will cost the rows that run: two of them here."""
    config = CONFIG.replace(max_new_tokens=CANVAS, stability_threshold=None)
    arrivals = [(0, Request([1], config)), (0, Request([2], config)), (1, Request([4], config))]
    _, watched = serve(toy_session, arrivals, overhead=overhead)
    assert watched.log[:1] == ["encode 0-1 1"]
    assert watched.log[1:].index("encode 2-2 1") == 1 + waits


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_cancelled_row_is_free_at_the_next_step(toy_session: OnnxRuntimeSession, steps: int) -> None:
    config = CONFIG.replace(max_new_tokens=CANVAS, stability_threshold=None)
    gone, next_one = Request([1], config), Request([2], config)
    watched = ArrivalSession(toy_session, [(0, gone), (0, next_one)])
    gone.is_cancelled = lambda: len(watched.steps) >= steps  # type: ignore[method-assign]
    scheduler = run(watched, rows=1)
    assert (gone.ends, next_one.ends) == (["cancelled"], ["length"])
    assert watched.log == ["encode 0-0 1", *["step 0-0"] * steps, "encode 0-0 1", *["step 0-0"] * 9]
    assert scheduler.counts.row_steps == steps + 9


def test_a_request_cancelled_while_it_waits_never_gets_a_row(toy_session: OnnxRuntimeSession) -> None:
    first, gone = Request([1]), Request([2], cancel_after=0)
    scheduler, _ = serve(toy_session, [(0, first), (0, gone)], rows=1)
    assert gone.ends == ["cancelled"]
    assert scheduler.counts.prompt_tokens == 1
    assert first.answer == expected([1], CONFIG, 0)


def test_a_full_queue_refuses_and_free_rows_do_not_count(toy_session: OnnxRuntimeSession) -> None:
    scheduler = Scheduler(toy_session, rows=2, queue_limit=1)
    requests = [Request([1]) for _ in range(4)]
    for request in requests[:3]:
        request.submit(scheduler, toy_session)
    with pytest.raises(OverloadedError, match=r"3 requests are waiting for a row; expected at most 1"):
        requests[3].submit(scheduler, toy_session)
    scheduler.close()
    scheduler.run()
    assert [len(request.ends) for request in requests] == [1, 1, 1, 0]


class FailingSession(ArrivalSession):
    """A session in which some denoising steps fail, or give one row what is no number."""

    def __init__(self, session: OnnxRuntimeSession, arrivals: Sequence[tuple[int, Request]], fails: set[int]) -> None:
        super().__init__(session, arrivals)
        self.fails = fails
        self.nan_at: tuple[int, int] | None = None  # step, row

    def denoise(self, batch: Batch, first: int, last: int) -> None:
        super().denoise(batch, first, last)
        step = len(self.steps)
        if step in self.fails:
            batch.cache.keys[0].fill(np.nan)
            raise EngineError(f"step {step} failed")
        if self.nan_at is not None and step == self.nan_at[0]:
            batch.entropy[self.nan_at[1]] = np.nan
            batch.cache.keys[0][self.nan_at[1]] = np.nan
            batch.self_conditioning[self.nan_at[1]] = np.nan


def test_a_failed_call_ends_its_rows_and_no_others(toy_session: OnnxRuntimeSession) -> None:
    requests = [Request([1 + index] * (index + 1), seed=index) for index in range(5)]
    session = FailingSession(toy_session, [(0, request) for request in requests], {4})
    scheduler = run(session, rows=2)
    assert [str(request.ends[0]) for request in requests[:2]] == ["step 4 failed"] * 2
    assert [request.answer for request in requests[2:]] == [expected(r.prompt, CONFIG, r.seed) for r in requests[2:]]
    assert (scheduler.counts.failed, scheduler.counts.finished, scheduler.failure) == (2, 3, None)


def test_an_engine_that_fails_again_and_again_is_given_up(toy_session: OnnxRuntimeSession) -> None:
    requests = [Request([1 + index]) for index in range(FAILURES_IN_A_ROW + 2)]
    session = FailingSession(toy_session, [(0, request) for request in requests], set(range(1, 100)))
    told: list[str] = []
    # The calls that are asked for are made all the same.
    requests[-1].on_error = lambda error: (  # type: ignore[method-assign]
        session.scheduler.call_soon(lambda: told.append("given up")),  # type: ignore[union-attr]
        requests[-1]._end(error),
    )
    scheduler = run(session, rows=1)
    assert all(isinstance(request.ends[0], EngineError) for request in requests)
    assert len(session.steps) == FAILURES_IN_A_ROW
    assert scheduler.failure is requests[-1].ends[0]
    assert told == ["given up"]
    with pytest.raises(EngineError, match="step 3 failed"):
        Request([1]).submit(scheduler, toy_session)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_row_that_gives_no_number_fails_alone(toy_session: OnnxRuntimeSession, place: int) -> None:
    """And leaves nothing behind in the row that the next request gets."""
    requests = [Request([1 + index] * (index + 1), seed=index) for index in range(6)]
    session = FailingSession(toy_session, [(0, request) for request in requests], set())
    session.nan_at = (2, place)
    scheduler = run(session, rows=3)
    failed = [request for request in requests if isinstance(request.ends[0], EngineError)]
    assert len(failed) == 1
    assert "entropy is nan in step 2" in str(failed[0].ends[0])
    others = [request for request in requests if request not in failed]
    assert [request.answer for request in others] == [expected(r.prompt, CONFIG, r.seed) for r in others]
    assert scheduler.counts.failed == 1


def test_an_engine_that_gives_no_numbers_at_all_is_given_up(toy_session: OnnxRuntimeSession) -> None:
    """As one with broken weights does: nobody gets anything from it."""

    class Nothing(ArrivalSession):
        def denoise(self, batch: Batch, first: int, last: int) -> None:
            super().denoise(batch, first, last)
            batch.entropy.fill(np.nan)

    requests = [Request([1 + index]) for index in range(2 * FAILURES_IN_A_ROW + 1)]
    session = Nothing(toy_session, [(0, request) for request in requests])
    scheduler = run(session, rows=2)
    assert all("entropy is nan" in str(request.ends[0]) for request in requests)
    assert len(session.steps) == FAILURES_IN_A_ROW
    assert scheduler.failure is not None


def test_waiting_requests_are_asked_by_turns(toy_session: OnnxRuntimeSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long queue must not take the engine's time, and none of it is forgotten."""
    monkeypatch.setattr("dgcompile.runtime.scheduler.QUEUE_CHECK_SECONDS", 0.0)
    monkeypatch.setattr("dgcompile.runtime.scheduler.QUEUE_CHECK_REQUESTS", 2)
    config = CONFIG.replace(max_new_tokens=CANVAS, stability_threshold=None)
    waiting = [Request([2], config) for _ in range(5)]
    running = Request([1], config)
    session = ArrivalSession(toy_session, [(0, request) for request in (running, *waiting)])
    asked: list[int] = []

    def note() -> bool:
        asked[:] = [request.asked for request in waiting]
        return False

    running.is_cancelled = note  # type: ignore[method-assign]
    run(session, rows=1)
    assert 9 <= sum(asked) <= 2 * 9 and max(asked) - min(asked) <= 1


@pytest.mark.parametrize("method", ["is_cancelled", "on_canvas", "on_finish"])
def test_a_listener_that_raises_hurts_nobody_else(
    toy_session: OnnxRuntimeSession, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = Request([1]), Request([2])

    def fail(*args: object) -> None:
        if method == "on_finish":
            bad.ends.append("raised")
            bad.after_end()
        raise ValueError("listener")

    monkeypatch.setattr(bad, method, fail)
    serve(toy_session, [(0, bad), (0, good)])
    assert good.answer == expected([1], CONFIG, 0)
    assert str(bad.ends[0]) in ("cancelled", "ValueError: listener", "raised")


def test_closing_ends_every_request(toy_session: OnnxRuntimeSession) -> None:
    scheduler = Scheduler(toy_session, rows=1, queue_limit=5)
    started = threading.Event()
    endless = Request([1], CONFIG.replace(max_new_tokens=20 * CANVAS, stability_threshold=None))
    endless.on_canvas = lambda job, token_ids: started.set()  # type: ignore[assignment, method-assign, return-value]
    waiting = Request([2])
    thread = threading.Thread(target=scheduler.run)
    thread.start()
    calls: list[threading.Thread] = []
    endless.submit(scheduler, toy_session)
    waiting.submit(scheduler, toy_session)
    assert started.wait(60)
    scheduler.call_soon(lambda: calls.append(threading.current_thread()))
    scheduler.close()
    thread.join(60)
    assert not thread.is_alive()
    assert calls == [thread]
    assert waiting.ends and "the service was closed" in str(waiting.ends[0])
    assert len(endless.ends) == 1
    for use in (lambda: Request([1]).submit(scheduler, toy_session), lambda: scheduler.call_soon(lambda: None)):
        with pytest.raises(EngineError, match="closed"):
            use()


def test_an_idle_scheduler_wakes_up_for_calls_and_requests(toy_session: OnnxRuntimeSession) -> None:
    scheduler = Scheduler(toy_session, rows=2, queue_limit=5)
    scheduler.warm_up()
    thread = threading.Thread(target=scheduler.run)
    thread.start()
    for _ in range(3):
        called, ended = threading.Event(), threading.Event()
        scheduler.call_soon(called.set)
        assert called.wait(60)
        request = Request([3, 4], after_end=ended.set)
        request.submit(scheduler, toy_session)
        assert ended.wait(60)
        assert request.answer == expected([3, 4], CONFIG, 0)
    steps, tokens = scheduler.rates()
    assert steps > 0 and tokens > 0
    scheduler.close()
    thread.join(60)


@pytest.mark.parametrize(("rows", "limit"), [(0, 1), (1, -1)])
def test_impossible_sizes_are_refused(toy_session: OnnxRuntimeSession, rows: int, limit: int) -> None:
    with pytest.raises(RequestError, match="expected at least"):
        Scheduler(toy_session, rows=rows, queue_limit=limit)
