"""The input: a file of JSON lines that may be larger than memory, read one line at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from dgcompile.content_hashes import FileIdentity
from dgcompile.progress import Progress

MAX_LINE_BYTES = 4 << 20
"""Longest line that is read: about a million tokens of text, more than any context here takes."""

_BOM = b"\xef\xbb\xbf"
_TOLD_BYTES = 16 << 20
"""How often reading tells its progress."""


@dataclass(frozen=True)
class Line:
    """A line that is not blank.

    Attributes:
        number: from 1; blank lines count.
        data: without the line end and the blanks around; None where it is longer than :data:`MAX_LINE_BYTES`.
    """

    number: int
    data: bytes | None


@dataclass(frozen=True)
class Contents:
    """What a file holds.

    Attributes:
        sha256: of all its bytes.
        identity: the file's, from before it was read.
        lines: lines that are not blank.
        last: number of the last of them; 0 where there is none.
    """

    sha256: str
    identity: FileIdentity
    lines: int
    last: int


def read_lines(file: BinaryIO, update: Callable[[bytes], object]) -> Iterator[Line]:
    """The lines of a file that are not blank.

    Lines end with LF or CRLF; the last one needs no end. A byte order mark before the first is dropped.

    Args:
        file: read from its start.
        update: given every byte of the file in order, blank lines and line ends too.
    """
    number = 0
    while chunk := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        update(chunk)
        if len(chunk) > MAX_LINE_BYTES and not chunk.endswith(b"\n"):
            while not chunk.endswith(b"\n") and (chunk := file.readline(MAX_LINE_BYTES)):
                update(chunk)
            yield Line(number, None)
            continue
        data = (chunk.removeprefix(_BOM) if number == 1 else chunk).strip()
        if data:
            yield Line(number, data)


def survey(path: Path, progress: Progress) -> Contents:
    """Reads a whole file once: what identifies it, and how much work it is.

    The hash of all bytes, not the size and time of change: a copy of the file continues a run, an edited one never
    does, and reading is nothing beside answering.

    Raises:
        OSError: it cannot be read.
    """
    identity = FileIdentity.of(path)
    digest = hashlib.sha256()
    size = told = lines = last = 0

    def update(chunk: bytes) -> None:
        nonlocal size
        digest.update(chunk)
        size += len(chunk)

    with path.open("rb") as file, progress.task(f"read {path.name}", identity.size, "bytes") as advance:
        for line in read_lines(file, update):
            lines, last = lines + 1, line.number
            if size - told >= _TOLD_BYTES:
                advance(size - told)
                told = size
        advance(size - told)
    return Contents(digest.hexdigest(), identity, lines, last)
