"""One build at a time in one folder."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from dgcompile.errors import BundleError
from dgcompile.file_lock import file_lock

LOCK_FILE = ".lock"
"""Exists in a bundle's folder while a build runs. One that a killed build left behind locks nobody out."""


def folder_lock(folder: Path) -> AbstractContextManager[None]:
    """Holds the folder's lock; see :func:`~dgcompile.file_lock.file_lock`.

    Raises:
        BundleError: another build holds it.
        OSError: the lock file cannot be made.
    """
    busy = BundleError(
        f"{folder}: another build is running in this folder", fix="wait for it, or choose another output folder"
    )
    return file_lock(folder / LOCK_FILE, busy)
