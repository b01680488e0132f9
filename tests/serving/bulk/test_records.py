"""Lines in, lines out, and what may be relied on of a file that was cut short."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dgcompile.errors import RequestError
from dgcompile.generation_config import GenerationConfig
from dgcompile.serving.bulk.lines import Line
from dgcompile.serving.bulk.records import (
    BulkOptions,
    LineSet,
    Written,
    answer_record,
    error_record,
    make_request,
    parse_line,
    read_written,
)
from dgcompile.serving.service import Completion, Usage

COMPLETION = Completion('Ä\n\u2028"', [5, 6, 1], "eos", 42, Usage(7, 3, 9, 1.5, 2.5, 3.5))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (None, "longer than"),
        (b"\xff", "not UTF-8 text at byte 0"),
        (b"{", "not JSON"),
        (b"[1]", "holds a list"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "thousands of digits"),
        (b'{"text": "a", "text": "b"}', "'text' occurs twice"),
        (b'{"id": true}', "id is a bool"),
        (b'{"id": 1.5}', "id is a float"),
        (b'{"id": []}', "id is a list"),
        (b'{"id": "' + b"x" * 513 + b'"}', "513 characters"),
    ],
)
def test_what_is_no_request_is_refused(data: bytes | None, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        parse_line(Line(3, data))


@pytest.mark.parametrize("line_id", ["a", "", 0, -(10**30), "\ud800"])
def test_an_id_comes_out_as_it_went_in(line_id: str | int) -> None:
    found, values = parse_line(Line(1, json.dumps({"id": line_id, "text": "a"}).encode()))
    assert (found, values) == (line_id, {"text": "a"})
    record = error_record(1, found, RequestError("no"))
    assert json.loads(record) == {"line": 1, "id": line_id, "error": "no"}


def test_a_line_wins_over_the_defaults_and_null_says_nothing() -> None:
    options = BulkOptions(defaults={"max_new_tokens": 5, "t_max": 1.5}, seed=100)
    request = make_request(7, {"text": "a", "max_new_tokens": 9, "t_max": None, "seed": None}, options)
    assert (request.max_new_tokens, request.t_max, request.seed) == (9, 1.5, 107)
    assert make_request(7, {"text": "a", "seed": 0}, options).seed == 0


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"text": "a", "prompt": "b"},
        {"text": 3},
        {"text": "a", "temperature": 1.0},
        {"text": "a", "max_new_tokens": 0},
        {"text": "a", "max_new_tokens": "9"},
        {"text": "a", "seed": -1},
        {"text": "a", "seed": 2**64},
        {"text": "a", "t_max": float("nan")},
        {"text": "a", "stop": ["\ud800"]},
        {"input_ids": [1.0]},
    ],
)
def test_bad_fields_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(RequestError, match="the line"):
        make_request(1, values, BulkOptions())


def test_an_answer_has_no_times() -> None:
    record = answer_record(4, "x", COMPLETION, BulkOptions(token_ids=True))
    assert json.loads(record) == {
        "line": 4,
        "id": "x",
        "text": 'Ä\n\u2028"',
        "token_ids": [5, 6, 1],
        "finish_reason": "eos",
        "seed": 42,
        "prompt_tokens": 7,
        "output_tokens": 3,
        "steps": 9,
    }
    assert record.count(b"\n") == 1 and "Ä".encode() in record
    plain = json.loads(answer_record(4, None, COMPLETION, BulkOptions()))
    assert "id" not in plain and "token_ids" not in plain


@given(st.lists(st.integers(-3, 70)))
def test_a_line_set_is_a_set_of_the_numbers_that_it_can_hold(numbers: list[int]) -> None:
    lines, model = LineSet(64), set[int]()
    for number in numbers:
        assert lines.add(number) == (1 <= number <= 64 and number not in model)
        if 1 <= number <= 64:
            model.add(number)
    assert {number for number in range(-5, 80) if number in lines} == model


@given(cut=st.integers(0, 1000), numbers=st.permutations(range(1, 8)), garbage=st.binary(max_size=5))
def test_a_cut_file_gives_its_whole_records(
    tmp_path_factory: pytest.TempPathFactory, cut: int, numbers: list[int], garbage: bytes
) -> None:
    records = [answer_record(number, None, COMPLETION, BulkOptions()) for number in numbers]
    kept = b"".join(records)[:cut]
    path = tmp_path_factory.mktemp("cut") / "out"
    path.write_bytes(kept + garbage.replace(b"\n", b"") + b"{")
    done = LineSet(7)
    written = read_written(path, done, ascending=False)
    whole = kept.count(b"\n")
    assert written == Written(sum(map(len, records[:whole])), whole, 3 * whole)
    assert [number for number in range(1, 8) if number in done] == sorted(numbers[:whole])


@pytest.mark.parametrize(
    "bad",
    [
        b"\0" * 20 + b"\n",
        b"\xff\n",
        b"[1]\n",
        b'{"line": "2"}\n',
        b'{"line": 1}\n',
        b'{"line": 5}\n',
        b'{"line": 0}\n',
        b'{"line": 2, "output_tokens": null}\n',
        b"{" * 100_000 + b"\n",
    ],
)
def test_nothing_counts_after_a_damaged_record(tmp_path: Path, bad: bytes) -> None:
    good, later = b'{"line": 1, "output_tokens": 3}\n', b'{"line": 3}\n'
    (tmp_path / "out").write_bytes(good + bad + later)
    done = LineSet(4)
    assert read_written(tmp_path / "out", done, ascending=True) == Written(len(good), 1, 3)
    assert 1 in done and 3 not in done


def test_an_ordered_file_ends_where_the_order_does(tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(b'{"line": 2}\n{"line": 1}\n')
    assert read_written(tmp_path / "out", LineSet(2), ascending=True).records == 1
    assert read_written(tmp_path / "out", LineSet(2), ascending=False).records == 2
    assert read_written(tmp_path / "none", LineSet(2), ascending=True) == Written()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (BulkOptions(defaults={"max_denoising_steps": 100_000}), "max_denoising_steps is 100000"),
        (BulkOptions(defaults={"t_max": 1e-9}), "t_max is 1e-09"),
        (BulkOptions(defaults={"t_min": 0.9}), "t_max must be the larger"),
        (BulkOptions(seed=2**64 - 5), "seed is 18446744073709551621"),
    ],
)
def test_options_that_no_line_could_be_answered_with_are_refused(options: BulkOptions, said: str) -> None:
    with pytest.raises(RequestError) as raised:
        options.check(10, GenerationConfig())
    assert said in str(raised.value)
