"""The bundle of the example, built once by the demo."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.helpers import finish, start

DEMO = ("demo", "--puzzles", "6")


@pytest.fixture(scope="session")
def first_demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The first demo of all: the bundle that it built, and what it printed."""
    bundle = tmp_path_factory.mktemp("demo") / "bundle"
    code, stdout, stderr = finish(start(*DEMO, "--bundle", str(bundle)))
    assert code == 0, stderr
    return bundle, stdout


@pytest.fixture(scope="session")
def sudoku_bundle(first_demo: tuple[Path, str]) -> Path:
    """The cpu bundle of ``examples/sudoku``. Do not write into it."""
    return first_demo[0]
