"""One line in, one line out: what a line of the input asks for, and the lines of the output and of the error file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dgcompile.config_file import parse_json
from dgcompile.errors import RequestError
from dgcompile.generation_config import GenerationConfig
from dgcompile.serving.bulk.lines import MAX_LINE_BYTES, Line
from dgcompile.serving.request import GenerateRequest
from dgcompile.serving.service import Completion

MAX_ID_LENGTH = 512
"""Characters of a line's id: ids wait in memory with their answers."""

LineId = str | int | None


@dataclass(frozen=True)
class BulkOptions:
    """How a file is answered.

    Attributes:
        defaults: generation options, by their names in :class:`GenerateRequest`, for lines that do not say.
        seed: a line that names no seed gets this plus its number, so that a rerun draws the same numbers.
        token_ids: whether the output has the token ids too.
        ordered: whether the output is in the order of the input; otherwise answers are written as they come.
    """

    defaults: Mapping[str, int | float] = field(default_factory=dict)
    seed: int = 0
    token_ids: bool = False
    ordered: bool = True

    def check(self, lines: int, defaults: GenerationConfig) -> None:
        """Refuses what no line could be answered with.

        Args:
            lines: number of the last line.
            defaults: the checkpoint's options.

        Raises:
            RequestError: names the option.
        """
        values = {**self.defaults, "prompt": "", "seed": self.seed + lines}
        GenerateRequest.from_values(values, "the options").generation(defaults)


def parse_line(line: Line) -> tuple[LineId, dict[str, Any]]:
    """The id of a line and its other fields, which are not checked yet.

    Raises:
        RequestError: too long, not UTF-8, not a JSON object, a key that occurs twice, or an id that is none.
    """
    if line.data is None:
        raise RequestError(f"the line is longer than {MAX_LINE_BYTES} bytes")
    values = parse_json(line.data, "the line", error=RequestError)
    line_id = values.pop("id", None)
    if line_id is not None and (isinstance(line_id, bool) or not isinstance(line_id, (str, int))):
        raise RequestError(f"id is a {type(line_id).__name__}", expected="a string or an integer")
    if len(str(line_id)) > MAX_ID_LENGTH:
        raise RequestError(f"id has {len(str(line_id))} characters", expected=f"at most {MAX_ID_LENGTH}")
    return line_id, values


def make_request(number: int, values: Mapping[str, Any], options: BulkOptions) -> GenerateRequest:
    """The request of a line, with the run's defaults where it says nothing (or null).

    Raises:
        RequestError: an unknown field, a wrong type or a value out of range; names the field.
    """
    said = {name: value for name, value in values.items() if value is not None}
    return GenerateRequest.from_values({**options.defaults, "seed": options.seed + number, **said}, "the line")


def answer_record(number: int, line_id: LineId, completion: Completion, options: BulkOptions) -> bytes:
    """A line of the output. It holds no times: the same input gives the same bytes."""
    return _record(
        {
            "line": number,
            **({} if line_id is None else {"id": line_id}),
            "text": completion.text,
            **({"token_ids": completion.token_ids} if options.token_ids else {}),
            "finish_reason": completion.finish_reason,
            "seed": completion.seed,
            "prompt_tokens": completion.usage.prompt_tokens,
            "output_tokens": completion.usage.output_tokens,
            "steps": completion.usage.steps,
        }
    )


def error_record(number: int, line_id: LineId, error: RequestError) -> bytes:
    """A line of the error file."""
    return _record({"line": number, **({} if line_id is None else {"id": line_id}), "error": str(error)})


def _record(values: Mapping[str, Any]) -> bytes:
    # A lone surrogate (only an id or an error can have one) is written as JSON's escape, which is the same text.
    return json.dumps(values, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"


class LineSet:
    """A set of line numbers, one bit each: an input may have more lines than memory has room for as integers.

    Args:
        last: the largest number that it can hold.
    """

    def __init__(self, last: int) -> None:
        self._last = last
        self._bits = bytearray(last // 8 + 1)

    def __contains__(self, number: int) -> bool:
        return 0 < number <= self._last and bool(self._bits[number >> 3] & 1 << (number & 7))

    def add(self, number: int) -> bool:
        """Adds a number from 1 to ``last``; False where that is impossible or it is there already."""
        if not 0 < number <= self._last or number in self:
            return False
        self._bits[number >> 3] |= 1 << (number & 7)
        return True


@dataclass(frozen=True)
class Written:
    """The part of a file of records that can be relied on.

    Attributes:
        bytes: its length.
        records: how many.
        output_tokens: of all answers in it.
    """

    bytes: int = 0
    records: int = 0
    output_tokens: int = 0


def read_written(path: Path, done: LineSet, *, ascending: bool) -> Written:
    """Finds what an interrupted run wrote, and adds its lines to ``done``.

    Everything from the first record on that is torn, damaged, out of order or about a line that is done already does
    not count: those lines are answered again.

    Args:
        path: the file; it may be missing.
        done: lines of the input that are done.
        ascending: whether the records must be in the order of the input.

    Raises:
        OSError: it cannot be read.
    """
    size = records = tokens = newest = 0
    for length, number, output_tokens in _whole_records(path):
        if (ascending and number <= newest) or not done.add(number):
            break
        size, records, tokens, newest = size + length, records + 1, tokens + output_tokens, number
    return Written(size, records, tokens)


def _whole_records(path: Path) -> Iterator[tuple[int, int, int]]:
    """(bytes, line, output tokens) of the records up to the first that is none."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for record in file:
            try:
                values = json.loads(record) if record.endswith(b"\n") else None
            except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
                return
            if not isinstance(values, dict):
                return
            number, tokens = values.get("line"), values.get("output_tokens", 0)
            if not isinstance(number, int) or not isinstance(tokens, int):
                return
            yield len(record), number, tokens
