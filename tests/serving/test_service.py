"""The service on the trained example: many at once get what each gets alone."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dgcompile.errors import DgcompileError, EngineError, OverloadedError, RequestError
from dgcompile.runtime.loop import GenerationResult
from dgcompile.runtime.pipeline import Pipeline
from dgcompile.serving.request import GenerateRequest
from dgcompile.serving.service import Completion, Delta, Service
from dgcompile.serving.statistics import METRICS
from tests.conftest import EXAMPLE

PUZZLES = [json.loads(line)["prompt"] for line in (EXAMPLE / "prompts.jsonl").read_text().splitlines()]

ENDLESS: dict[str, Any] = {"t_min": 1e5, "t_max": 2e5, "max_denoising_steps": 10**4}
"""Options of an answer that takes longer than any test: so hot, no canvas ever settles."""


class Client:
    """A listener that keeps what it is told."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []
        self.end: Completion | DgcompileError | str | None = None
        self.cancelled = False
        self.is_over = threading.Event()

    def is_cancelled(self) -> bool:
        return self.cancelled

    def on_delta(self, delta: Delta) -> None:
        assert self.end is None
        self.deltas.append(delta)

    def on_finish(self, completion: Completion) -> None:
        self._over(completion)

    def on_cancelled(self) -> None:
        self._over("cancelled")

    def on_error(self, error: DgcompileError) -> None:
        self._over(error)

    def _over(self, end: Completion | DgcompileError | str) -> None:
        assert self.end is None
        self.end = end
        self.is_over.set()

    def completion(self) -> Completion:
        """The answer, once it is there."""
        assert self.is_over.wait(120)
        assert isinstance(self.end, Completion), self.end
        return self.end


@pytest.fixture(scope="module")
def alone(example_bundle: Path) -> Callable[[str, int], GenerationResult]:
    """What the pipeline says to a puzzle, alone."""
    pipeline = Pipeline.open(example_bundle, threads=1)
    known: dict[tuple[str, int], GenerationResult] = {}

    def answer(puzzle: str, seed: int) -> GenerationResult:
        if (puzzle, seed) not in known:
            prompt = pipeline.encode([{"role": "user", "content": puzzle}])
            known[puzzle, seed] = pipeline.generate([prompt], seeds=[seed])[0]
        return known[puzzle, seed]

    return answer


@pytest.fixture(scope="module")
def service(example_bundle: Path) -> Iterator[Service]:
    service = Service.open(example_bundle, rows=4, queue_limit=20, threads=1)
    yield service
    service.close()


def ask(service: Service, **values: Any) -> Client:
    client = Client()
    service.submit(GenerateRequest.from_values(values), client)
    return client


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    requests=st.lists(
        st.tuples(
            st.integers(0, 30),  # the puzzle
            st.integers(0, 3),  # its seed
            st.integers(0, 20),  # milliseconds until it arrives
            st.sampled_from([None, None, None, 0, 5, 30]),  # milliseconds until it is cancelled
        ),
        min_size=1,
        max_size=10,
    )
)
def test_a_request_gets_what_it_gets_alone(
    service: Service, alone: Callable[[str, int], GenerationResult], requests: list[tuple[int, int, int, int | None]]
) -> None:
    """Whenever it arrives, beside whomever, whoever is cancelled: the same tokens and the same denoising steps."""
    before = service.statistics()
    clients = []
    for number, seed, wait, cancel in requests:
        time.sleep(wait / 1000)
        clients.append(ask(service, text=PUZZLES[number], seed=seed))
        if cancel is not None:
            threading.Timer(cancel / 1000, lambda client=clients[-1]: setattr(client, "cancelled", True)).start()
    for client, (number, seed, _, cancel) in zip(clients, requests, strict=True):
        assert client.is_over.wait(120)
        if client.end == "cancelled":
            assert cancel is not None
            continue
        completion, expected = client.completion(), alone(PUZZLES[number], seed)
        assert completion.token_ids == expected.token_ids
        assert (completion.finish_reason, completion.usage.steps) == (
            expected.finish_reason,
            sum(expected.steps_per_canvas),
        )
    after = service.statistics()
    ended = after.finished + after.cancelled - before.finished - before.cancelled
    assert ended == len(requests) and after.failed == 0


def test_sixteen_threads_at_once(service: Service, alone: Callable[[str, int], GenerationResult]) -> None:
    def serve(number: int) -> bool:
        client = ask(service, text=PUZZLES[number], seed=number)
        return client.completion().token_ids == alone(PUZZLES[number], number).token_ids

    for number in range(16):
        alone(PUZZLES[number], number)
    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(serve, range(16)))


def test_an_answer_comes_canvas_by_canvas(bundle: Path) -> None:
    """Deltas joined are the text; usage adds up; a seed that was drawn gives the same answer again."""
    service = Service.open(bundle, rows=2, threads=1)
    try:
        length = service.pipeline.bundle.spec.canvas_length
        client = ask(service, text="Hello", max_new_tokens=3 * length - 2)
        completion = client.completion()
        assert "".join(delta.text for delta in client.deltas) == completion.text
        assert [token for delta in client.deltas for token in delta.token_ids] == completion.token_ids
        assert [delta.canvas for delta in client.deltas] == list(range(len(client.deltas)))
        usage = completion.usage
        assert usage.steps == sum(delta.steps for delta in client.deltas)
        assert usage.prompt_tokens == len(service.pipeline.encode([{"role": "user", "content": "Hello"}]))
        assert usage.output_tokens == len(completion.token_ids)
        assert 0 <= usage.queue_ms <= usage.first_canvas_ms <= usage.total_ms
        again = ask(service, text="Hello", max_new_tokens=3 * length - 2, seed=completion.seed).completion()
        assert again.token_ids == completion.token_ids
        assert completion.text == service.pipeline.decode(completion.token_ids)
    finally:
        service.close()


def test_a_stop_string_ends_the_answer(service: Service) -> None:
    whole = ask(service, text=PUZZLES[0], seed=1).completion()
    stop = whole.text[10:13]
    client = ask(service, text=PUZZLES[0], seed=1, stop=["never", stop])
    cut = client.completion()
    assert cut.finish_reason == "stop"
    assert cut.text == whole.text[: whole.text.index(stop)] == "".join(delta.text for delta in client.deltas)


def test_what_cannot_be_served_is_refused_and_counted(service: Service) -> None:
    before = service.statistics().refused
    for values, message in (
        ({"text": PUZZLES[0], "max_new_tokens": 10**9}, "the bundle's max_context"),
        ({"text": "1 " * 400_000}, r"the prompt has 800000 characters; expected at most \d+: more do not fit"),
        ({"messages": [{"role": "user", "content": [{"text": "1" * 10**6}]}]}, "the prompt has 1000004 characters"),
        ({"prompt": "1" * 10**6}, "the prompt has 1000000 characters"),
        ({"input_ids": []}, "the prompt is empty"),
        ({"input_ids": [10**9]}, "the prompt has 1000000000 at position 0"),
        ({"text": PUZZLES[0], "t_max": 0.1, "t_min": 0.2}, "t_max must be the larger"),
    ):
        with pytest.raises(RequestError, match=message):
            ask(service, **values)
    assert service.statistics().refused == before + 7


def test_a_full_queue_refuses_until_a_row_is_free(example_bundle: Path) -> None:
    service = Service.open(example_bundle, rows=1, queue_limit=1, threads=1)
    running, waiting = (ask(service, text=PUZZLES[0], **ENDLESS) for _ in range(2))
    with pytest.raises(OverloadedError, match="waiting for a row"):
        while True:  # the row may not be taken yet
            ask(service, text=PUZZLES[0], **ENDLESS)
    running.cancelled = True
    assert running.is_over.wait(60) and running.end == "cancelled"
    service.close()
    assert isinstance(waiting.end, EngineError)
    service.close()
    with pytest.raises(EngineError, match="closed"):
        ask(service, text=PUZZLES[0])


def test_the_metrics_are_what_happened(service: Service) -> None:
    ask(service, text=PUZZLES[0], seed=0).completion()
    values = {metric.name: metric.value(service.statistics()) for metric in METRICS}
    assert len(values) == len(METRICS)
    assert values["dgcompile_rows"] == 4
    assert values["dgcompile_active_rows"] == values["dgcompile_queued_requests"] == 0
    assert values["dgcompile_requests_finished"] >= 1
    assert values["dgcompile_row_steps"] >= values["dgcompile_denoising_steps"] >= 1
    assert values["dgcompile_steps_per_second"] > 0
    assert values["dgcompile_tokens_per_step"] == pytest.approx(
        values["dgcompile_output_tokens"] / values["dgcompile_row_steps"]
    )
    assert values["dgcompile_first_canvas_seconds_count"] >= 1
