"""A lock file: one process at a time."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dgcompile.errors import DgcompileError


@contextmanager
def file_lock(path: Path, busy: DgcompileError) -> Iterator[None]:
    """Holds the lock. The system drops it with the process, whatever ends that.

    Args:
        path: exists while the lock is held. A file that a killed process left behind locks nobody out.
        busy: raised when another process holds it.

    Raises:
        DgcompileError: ``busy``.
        OSError: the lock file cannot be made.
    """
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(handle)
            raise busy from error
        except BaseException:
            os.close(handle)
            raise
        if _is_current(handle, path):
            break
        # The former holder removed the file between our open and our lock: lock the new one instead.
        os.close(handle)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)


def _is_current(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False
