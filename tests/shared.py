"""What is made once for all of pytest-xdist's workers: a build takes half a minute of a core."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A folder that the first worker to need it makes, and the others wait for.

    Args:
        factory: pytest's own.
        name: the folder's name.
        make: makes it, at the path it is given.
    """
    base = factory.getbasetemp()
    # Each worker has a folder of its own in the run's.
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, done = shared / name, shared / f"{name}.done"
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            make(folder)
            done.touch()
    return folder
