"""The input: lines of a file as they come off the disk."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dgcompile.progress import Progress
from dgcompile.serving.bulk import lines
from dgcompile.serving.bulk.lines import Line, read_lines, survey

BOM = b"\xef\xbb\xbf"


def read(data: bytes) -> tuple[list[Line], bytes]:
    seen = bytearray()
    return list(read_lines(io.BytesIO(data), seen.extend)), bytes(seen)


@given(
    contents=st.lists(st.sampled_from([b"", b"  ", b"\t", b"{}", b'{"a": "\xc3\xa4"}', b"\xff\xfe", b"x" * 40])),
    ends=st.lists(st.sampled_from([b"\n", b"\r\n"]), min_size=30, max_size=30),
    bom=st.booleans(),
    last_end=st.booleans(),
)
def test_every_line_that_is_not_blank_with_its_number(
    contents: list[bytes], ends: list[bytes], bom: bool, last_end: bool
) -> None:
    contents = contents[:30]
    data = b"".join(content + end for content, end in zip(contents, ends, strict=False))
    if contents and not last_end:
        data = data.removesuffix(ends[len(contents) - 1])
    found, seen = read(BOM * bom + data)
    assert found == [Line(number, content) for number, content in enumerate(contents, 1) if content.strip()]
    assert seen == BOM * bom + data


@pytest.mark.parametrize(
    ("length", "end", "kept"),
    [(10, b"\n", True), (10, b"", True), (11, b"\n", False), (11, b"", False), (21, b"\n", False), (45, b"", False)],
)
def test_a_line_that_is_too_long_is_told_and_skipped(
    monkeypatch: pytest.MonkeyPatch, length: int, end: bytes, kept: bool
) -> None:
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 10)
    rest = b"b\n" if end else b""
    found, seen = read(b"a\n" + b"x" * length + end + rest)
    assert found[:2] == [Line(1, b"a"), Line(2, b"x" * length if kept else None)]
    assert found[2:] == ([Line(3, b"b")] if end else [])
    assert seen == b"a\n" + b"x" * length + end + rest


def test_a_survey_counts_and_identifies(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_bytes(b"\n{}\n\n{}\n\n")
    contents = survey(file, Progress())
    assert (contents.lines, contents.last) == (2, 4)
    assert contents.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    file.write_bytes(b"\n\n")
    assert (survey(file, Progress()).lines, survey(file, Progress()).last) == (0, 0)
