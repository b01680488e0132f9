"""Fixtures that several test folders share."""

from __future__ import annotations

import os
from pathlib import Path

# The models are tiny: a second thread of torch only waits, and beside another busy process it waits long. Before torch
# is imported, so that the processes which tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from dgcompile.build import build
from dgcompile.recipe import Recipe
from dgcompile.target import Target
from tests.models import random_checkpoint
from tests.shared import made_once

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "sudoku"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random checkpoint in the published layout. Shared by all tests: do not write into it."""
    return random_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session")
def bundle(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cpu bundle of ``checkpoint``. Shared by all tests: do not write into it."""
    return made_once(tmp_path_factory, "bundle", lambda folder: _build(checkpoint, folder))


@pytest.fixture(scope="session")
def example_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cpu bundle of the trained example. Shared by all tests: do not write into it."""
    return made_once(tmp_path_factory, "example", lambda folder: _build(EXAMPLE, folder))


def _build(checkpoint: Path, folder: Path) -> None:
    build(checkpoint, Target.load("cpu"), Recipe.load("fp32"), folder)
