"""Fixtures that several test folders share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models import random_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random checkpoint in the published layout. Shared by all tests: do not write into it."""
    return random_checkpoint(tmp_path_factory.mktemp("checkpoint"))
