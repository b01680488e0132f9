"""Writing files so that a killed process leaves nothing half-written under a final name, and hashing them."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from dgcompile.progress import Advance

PARTIAL_SUFFIX = ".partial"
"""Ending of files that are still being written; nothing ever reads one as finished."""

_CHUNK_BYTES = 256 << 10  # stays in a core's cache between reading and hashing


def sync_folder(folder: Path) -> None:
    """Makes renames inside ``folder`` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomically(path: Path, data: bytes) -> None:
    """Writes ``path`` beside its final name and renames it, so that it holds either its old content or all of ``data``.

    Raises:
        OSError: as the file system reports it; the partial file is removed then.
    """
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sha256_file(path: Path, advance: Advance | None = None) -> str:
    """SHA-256 of a file in hexadecimal, read in chunks; ``advance`` is given the bytes of each."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            if advance is not None:
                advance(count)
    return digest.hexdigest()
