"""One build at a time in one folder."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dgcompile.errors import BundleError

LOCK_FILE = ".lock"
"""Exists in a bundle's folder while a build runs. One that a killed build left behind locks nobody out."""


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Holds the folder's lock. The system drops it with the process, whatever ends that.

    Raises:
        BundleError: another build holds it.
        OSError: the lock file cannot be made.
    """
    path = folder / LOCK_FILE
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(handle)
            raise BundleError(
                f"{folder}: another build is running in this folder",
                fix="wait for it, or choose another output folder",
            ) from error
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
