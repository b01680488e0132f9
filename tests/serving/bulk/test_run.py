"""Whole runs in this process: the real service over the toy model, whose answers are the same in any company."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgcompile.errors import BundleError, EngineError, RequestError
from dgcompile.progress import Advance, Progress
from dgcompile.runtime.pipeline import Pipeline
from dgcompile.runtime.session import Batch, Session
from dgcompile.serving.bulk import feed
from dgcompile.serving.bulk.output import OutputFiles
from dgcompile.serving.bulk.records import BulkOptions
from dgcompile.serving.bulk.run import BulkReport, run_bulk
from dgcompile.serving.request import GenerateRequest
from dgcompile.serving.service import Listener, Service
from tests.runtime.test_loop import WatchedSession
from tests.serving.bulk.toy import toy_pipeline

OPTIONS = BulkOptions(defaults={"max_new_tokens": 8}, seed=1000, token_ids=True)
ROWS = 4

GOOD: tuple[dict[str, Any], ...] = (
    {"text": "Why?"},
    {"prompt": "one two three"},
    {"input_ids": [9, 10, 11]},
    {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "Ä Ω"}], "id": "ä"},
    {"text": "a longer answer", "max_new_tokens": 40, "id": 7},
    {"text": "seeded", "seed": 2**64 - 1, "id": -1},
    {"text": "steps", "max_denoising_steps": 2, "t_min": 0.1, "t_max": 2.0, "entropy_bound": 3.0, "seed": None},
)
BAD: tuple[bytes, ...] = (
    b"{",
    b"\xff\xfe",
    b"[]",
    b"null",
    b'{"text": "a"',
    b'{"text": "a", "text": "b"}',
    b'{"text": "a", "temperature": 1}',
    b'{"text": ""' + b" " * 20 + b', "prompt": "b"}',
    b'{"prompt": ""}',
    b'{"text": "\\ud800"}',
    b'{"text": "' + b"long " * 5000 + b'"}',
    b'{"input_ids": []}',
    b'{"input_ids": [32]}',
    b'{"input_ids": [-1]}',
    b'{"messages": []}',
    b'{"messages": [{"role": "nobody", "content": "a"}]}',
    b'{"text": "a", "max_new_tokens": 100000}',
    b'{"text": "a", "t_min": 5.0}',
    b'{"text": "a", "stop": "x"}',
)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    return toy_pipeline(tmp_path_factory.mktemp("bundle"))


@pytest.fixture(scope="module")
def expected(pipeline: Pipeline) -> Callable[[bytes, BulkOptions], tuple[list[dict[str, Any]], list[int]]]:
    """What a file must give, each line by itself: the records in order, and the numbers of the bad lines."""
    known: dict[tuple[bytes, int], dict[str, Any]] = {}

    def answer(line: bytes, seed: int, options: BulkOptions) -> dict[str, Any]:
        values = {name: value for name, value in json.loads(line).items() if value is not None}
        line_id = values.pop("id", None)
        request = GenerateRequest.from_values({**options.defaults, "seed": seed, **values})
        prompt = request.token_ids(pipeline)
        assert request.seed is not None
        (result,) = pipeline.generate([prompt], request.generation(pipeline.bundle.generation), [request.seed])
        return {
            **({} if line_id is None else {"id": line_id}),
            "text": pipeline.decode(result.token_ids),
            "token_ids": result.token_ids,
            "finish_reason": result.finish_reason,
            "seed": request.seed,
            "prompt_tokens": len(prompt),
            "output_tokens": len(result.token_ids),
            "steps": sum(result.steps_per_canvas),
        }

    def of(data: bytes, options: BulkOptions) -> tuple[list[dict[str, Any]], list[int]]:
        records, bad = [], []
        for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
            line = line.strip()
            if line in BAD:
                bad.append(number)
            elif line:
                key = (line, options.seed + number)
                if key not in known:
                    known[key] = answer(*key, options)
                records.append({"line": number, **known[key]})
        return records, bad

    return of


def batch(
    pipeline: Pipeline,
    folder: Path,
    data: bytes | None = None,
    options: BulkOptions = OPTIONS,
    *,
    make: Callable[[], Service] | None = None,
    **more: Any,
) -> BulkReport:
    """One run in ``folder``, of in.jsonl into out.jsonl."""
    if data is not None:
        (folder / "in.jsonl").write_bytes(data)
    make = make or (lambda: Service(pipeline, rows=ROWS))
    return run_bulk(make, pipeline.bundle.path, folder / "in.jsonl", folder / "out.jsonl", options, **more)


def records(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    data = path.read_bytes()
    assert not data or data.endswith(b"\n")
    return [json.loads(line) for line in data.split(b"\n")[:-1]]


def lines_of(*values: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


MIXED = b"".join(
    (BAD[index // 3] if index % 3 == 2 else json.dumps(GOOD[index % len(GOOD)]).encode()) + b"\n" for index in range(50)
)


@given(
    kinds=st.lists(
        st.one_of(
            st.sampled_from(GOOD).map(lambda value: json.dumps(value).encode()),
            st.sampled_from(BAD),
            st.sampled_from([b"", b" \t"]),
        ),
        max_size=25,
    ),
    end=st.sampled_from([b"\n", b"\r\n"]),
    bom=st.booleans(),
    last_end=st.booleans(),
    ordered=st.booleans(),
)
@settings(max_examples=20, deadline=None)
def test_every_good_line_gets_the_answer_it_gets_alone(
    pipeline: Pipeline,
    expected: Callable[[bytes, BulkOptions], tuple[list[dict[str, Any]], list[int]]],
    tmp_path_factory: pytest.TempPathFactory,
    kinds: list[bytes],
    end: bytes,
    bom: bool,
    last_end: bool,
    ordered: bool,
) -> None:
    folder = tmp_path_factory.mktemp("run")
    data = b"\xef\xbb\xbf" * bom + end.join(kinds) + end * last_end
    options = BulkOptions(OPTIONS.defaults, OPTIONS.seed, token_ids=True, ordered=ordered)
    report = batch(pipeline, folder, data, options)
    answers, bad = expected(data, options)
    found = records(folder / "out.jsonl")
    assert (found if ordered else sorted(found, key=lambda record: record["line"])) == answers
    errors = records(folder / "out.errors.jsonl")
    assert [record["line"] for record in errors] == bad
    assert all(record["error"] for record in errors)
    assert (report.lines, report.answered, report.bad) == (len(answers) + len(bad), len(answers), len(bad))
    assert report.output_tokens == report.new_tokens == sum(record["output_tokens"] for record in answers)
    assert report.errors == (folder / "out.errors.jsonl" if bad else None)
    assert {path.name for path in folder.iterdir()} == {
        "in.jsonl",
        "out.jsonl",
        *(["out.errors.jsonl"] if bad else []),
    }


@pytest.fixture(scope="module")
def undisturbed(pipeline: Pipeline, tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    """The output and the error file of MIXED."""
    folder = tmp_path_factory.mktemp("undisturbed")
    report = batch(pipeline, folder, MIXED)
    assert (report.answered, report.bad) == (34, 16)
    assert report.rows_per_step > 2
    return (folder / "out.jsonl").read_bytes(), (folder / "out.errors.jsonl").read_bytes()


class Killer(Progress):
    """Interrupts the run when so many lines are done, those of earlier runs included."""

    def __init__(self, lines: int) -> None:
        self._lines = lines

    @contextmanager
    def task(
        self, label: str, total: float | None = None, unit: str = "", *, note: Callable[[], str] | None = None
    ) -> Iterator[Advance]:
        done = 0.0

        def advance(amount: float = 1.0, /) -> None:
            nonlocal done
            if unit == "lines":
                assert note is not None and note().endswith(" tokens/s")
                done += amount
                if done == self._lines:
                    raise KeyboardInterrupt

        yield advance


@given(cut=st.floats(0, 1), cut_errors=st.floats(0, 1), tail=st.sampled_from([b"", b'{"line": 49, "te', b"\0\0\0"]))
@settings(max_examples=15, deadline=None)
def test_whatever_a_kill_leaves_is_continued_to_the_same_bytes(
    pipeline: Pipeline,
    undisturbed: tuple[bytes, bytes],
    tmp_path_factory: pytest.TempPathFactory,
    cut: float,
    cut_errors: float,
    tail: bytes,
) -> None:
    """Each partial file is cut at any byte, as a kill or a power cut may leave it."""
    folder = tmp_path_factory.mktemp("killed")
    with pytest.raises(KeyboardInterrupt):
        batch(pipeline, folder, MIXED, progress=Killer(1))
    files = OutputFiles.of(folder / "out.jsonl")
    kept = undisturbed[0][: round(cut * len(undisturbed[0]))]
    kept_errors = undisturbed[1][: round(cut_errors * len(undisturbed[1]))]
    files.partial_output.write_bytes(kept + (tail if kept.endswith(b"\n") else b""))
    files.partial_errors.write_bytes(kept_errors)
    report = batch(pipeline, folder)
    assert (files.output.read_bytes(), files.errors.read_bytes()) == undisturbed
    assert report.done_before == kept.count(b"\n") + kept_errors.count(b"\n")
    assert (report.answered, report.bad) == (34, 16)


@pytest.mark.parametrize("ordered", [True, False])
def test_a_run_interrupted_again_and_again_ends_complete(
    pipeline: Pipeline, undisturbed: tuple[bytes, bytes], tmp_path: Path, ordered: bool
) -> None:
    options = BulkOptions(OPTIONS.defaults, OPTIONS.seed, token_ids=True, ordered=ordered)
    (tmp_path / "in.jsonl").write_bytes(MIXED)
    for after in (1, 8, 21, 38):
        with pytest.raises(KeyboardInterrupt):
            batch(pipeline, tmp_path, options=options, progress=Killer(after))
        assert not (tmp_path / "out.jsonl").exists()
    report = batch(pipeline, tmp_path, options=options)
    assert report.done_before == 38
    output = (tmp_path / "out.jsonl").read_bytes()
    if ordered:
        assert output == undisturbed[0]
    assert sorted(output.splitlines()) == sorted(undisturbed[0].splitlines())
    assert (tmp_path / "out.errors.jsonl").read_bytes() == undisturbed[1]
    assert not OutputFiles.of(tmp_path / "out.jsonl").state.exists()


def test_a_run_killed_before_its_state_was_removed_is_done(
    pipeline: Pipeline, undisturbed: tuple[bytes, bytes], tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        batch(pipeline, tmp_path, MIXED, progress=Killer(1))
    files = OutputFiles.of(tmp_path / "out.jsonl")
    files.partial_output.unlink()
    files.partial_errors.unlink()
    files.output.write_bytes(undisturbed[0])
    files.errors.write_bytes(undisturbed[1][:-5])
    with pytest.raises(RequestError, match="does not have all lines"):
        batch(pipeline, tmp_path)
    files.errors.write_bytes(undisturbed[1])
    report = batch(pipeline, tmp_path)
    assert (report.lines, report.answered, report.bad, report.done_before, report.new_tokens) == (50, 34, 16, 50, 0)
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "out.jsonl", "out.errors.jsonl"}
    with pytest.raises(RequestError, match="exists"):
        batch(pipeline, tmp_path)


def test_the_batch_stays_full(pipeline: Pipeline, tmp_path: Path) -> None:
    report = batch(pipeline, tmp_path, lines_of(*({"text": f"number {index}"} for index in range(80))))
    assert report.rows_per_step > 0.9 * ROWS
    assert report.steps * report.rows_per_step == pytest.approx(
        sum(r["steps"] for r in records(tmp_path / "out.jsonl"))
    )


class Counting(Service):
    """Notes how many lines were taken beyond those that are written."""

    output: Path
    most = 0
    taken = 0

    def submit(self, request: GenerateRequest, listener: Listener) -> None:
        super().submit(request, listener)
        self.taken += 1
        self.most = max(self.most, self.taken - self.output.read_bytes().count(b"\n"))


@pytest.mark.parametrize("ordered", [True, False])
def test_lines_wait_for_a_slow_one_within_bounds(
    pipeline: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ordered: bool
) -> None:
    monkeypatch.setattr(feed, "WINDOW", 5)
    service = Counting(pipeline, rows=2)
    service.output = OutputFiles.of(tmp_path / "out.jsonl").partial_output
    data = lines_of({"text": "slow", "max_new_tokens": 90}, *({"text": f"number {index}"} for index in range(30)))
    options = BulkOptions({"max_new_tokens": 4}, ordered=ordered)
    batch(pipeline, tmp_path, data, options, make=lambda: service)
    assert service.most == 7
    numbers = [record["line"] for record in records(tmp_path / "out.jsonl")]
    assert sorted(numbers) == list(range(1, 32))
    assert (numbers == sorted(numbers)) is ordered
    if not ordered:
        assert numbers.index(1) > 2, "nothing overtook the slow line"


def test_a_short_queue_is_waited_for(pipeline: Pipeline, undisturbed: tuple[bytes, bytes], tmp_path: Path) -> None:
    batch(pipeline, tmp_path, MIXED, make=lambda: Service(pipeline, rows=2, queue_limit=1))
    assert (tmp_path / "out.jsonl").read_bytes() == undisturbed[0]


class Breaking(WatchedSession):
    """A session whose engine fails after so many steps."""

    def denoise(self, batch: Batch, first: int, last: int) -> None:
        super().denoise(batch, first, last)
        if len(self.steps) > 40:
            raise EngineError("the engine is broken")


def test_a_failed_engine_stops_a_run_that_can_go_on(
    pipeline: Pipeline, undisturbed: tuple[bytes, bytes], tmp_path: Path
) -> None:
    broken: Session = Breaking(pipeline.session)  # type: ignore[arg-type]
    failing = Pipeline(pipeline.bundle, broken, pipeline.tokenizer, pipeline.chat_template)
    with pytest.raises(EngineError, match=r"the engine is broken.*run the same command again"):
        batch(failing, tmp_path, MIXED)
    assert not (tmp_path / "out.jsonl").exists()
    assert batch(pipeline, tmp_path).done_before > 0
    assert (tmp_path / "out.jsonl").read_bytes() == undisturbed[0]


class Meanwhile(Progress):
    """Another program that does something to the input once ``after`` lines are done."""

    def __init__(self, act: Callable[[], object], after: int) -> None:
        self._act = act
        self._left = after

    @contextmanager
    def task(
        self, label: str, total: float | None = None, unit: str = "", *, note: Callable[[], str] | None = None
    ) -> Iterator[Advance]:
        def advance(amount: float = 1.0, /) -> None:
            self._left -= unit == "lines"
            if unit == "lines" and not self._left:
                self._act()

        yield advance


@pytest.mark.parametrize("after", [1, len(GOOD)])  # soon, or when all of it was read
@pytest.mark.parametrize("window", [1, 100])
def test_an_input_that_changes_meanwhile_is_noticed(
    pipeline: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int, window: int
) -> None:
    monkeypatch.setattr(feed, "WINDOW", window)
    source = tmp_path / "in.jsonl"
    # More than is read at a time lies before the line that changes.
    data = lines_of(*GOOD[:5]) + b"\n" * 200_000 + lines_of(*GOOD[5:])
    batch(pipeline, tmp_path, data, progress=Meanwhile(source.touch, after))
    (tmp_path / "out.jsonl").unlink()

    changed = data.replace(b"seeded", b"sewn")
    assert changed != data
    with pytest.raises(RequestError, match="changed while it was read"):
        batch(pipeline, tmp_path, data, progress=Meanwhile(lambda: source.write_bytes(changed), after))
    if after == window == 1:
        with pytest.raises(RequestError, match="--overwrite"):
            batch(pipeline, tmp_path, data)  # its partial file has an answer to the other content
    assert batch(pipeline, tmp_path, data, overwrite=True).answered == len(GOOD)
    (tmp_path / "out.jsonl").unlink()

    grown = data + lines_of({"text": "late"})
    with pytest.raises(RequestError, match="changed while it was read"):
        batch(pipeline, tmp_path, data, progress=Meanwhile(lambda: source.write_bytes(grown), after))
    assert not (tmp_path / "out.jsonl").exists()
    with pytest.raises(RequestError, match="--overwrite"):
        batch(pipeline, tmp_path)
    report = batch(pipeline, tmp_path, overwrite=True)
    assert (report.answered, report.done_before) == (len(GOOD) + 1, 0)


def test_an_input_without_lines_gives_an_output_without_lines(pipeline: Pipeline, tmp_path: Path) -> None:
    report = batch(pipeline, tmp_path, b"\n \r\n")
    assert (report.lines, report.tokens_per_second, report.rows_per_step) == (0, 0, 0)
    assert (tmp_path / "out.jsonl").read_bytes() == b""


def test_what_is_wrong_for_all_lines_is_said_before_anything_is_written(pipeline: Pipeline, tmp_path: Path) -> None:
    for defaults in ({"max_new_tokens": 0}, {"t_min": 3.0}):
        with pytest.raises(RequestError, match=r"options: (max_new_tokens is 0|t_max is 0\.8)"):
            batch(pipeline, tmp_path, b"{}", BulkOptions(defaults))
        assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
    with pytest.raises(BundleError):
        run_bulk(lambda: pytest.fail("loaded"), tmp_path, tmp_path / "in.jsonl", tmp_path / "out", OPTIONS)


def test_an_overwritten_output_stays_until_the_new_one_is_complete(pipeline: Pipeline, tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text("old")
    (tmp_path / "out.errors.jsonl").write_text("old")
    with pytest.raises(RequestError, match="exists"):
        batch(pipeline, tmp_path, lines_of(*GOOD))
    with pytest.raises(KeyboardInterrupt):
        batch(pipeline, tmp_path, overwrite=True, progress=Killer(3))
    assert (tmp_path / "out.jsonl").read_text() == "old"
    assert batch(pipeline, tmp_path, overwrite=True).done_before == 3
    assert len(records(tmp_path / "out.jsonl")) == len(GOOD)
    assert not (tmp_path / "out.errors.jsonl").exists()
