"""A real Triton Inference Server for the tests."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dgcompile.build import build
from dgcompile.recipe import Recipe
from dgcompile.target import Target
from tests.serving.triton.server import ROOT, Installation, ServerUnavailableError, TritonServer, install

LOG_LINES = 60


@pytest.fixture(scope="session")
def installation() -> Installation:
    """The server's files. Tests that need them are skipped where they cannot be had, and fail where they must be."""
    try:
        return install()
    except ServerUnavailableError as error:
        message = f"no Triton Inference Server: {error}"
        if os.environ.get("CI") or os.environ.get("DGCOMPILE_REQUIRE_TRITON"):
            pytest.fail(message)
        warnings.warn(f"TESTS OF TRITON ARE SKIPPED: {message}", stacklevel=1)
        pytest.skip(message)


@pytest.fixture(scope="session")
def example_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cpu bundle of the trained example. Do not write into it."""
    folder = tmp_path_factory.mktemp("example") / "bundle"
    build(ROOT / "examples" / "sudoku", Target.load("cpu"), Recipe.load("fp32"), folder)
    return folder


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Shows the end of the server's log with a test that failed."""
    report: Any = yield
    if report.failed:
        for name, value in getattr(item, "funcargs", {}).items():
            if isinstance(value, TritonServer):
                log = "\n".join(value.log_text().splitlines()[-LOG_LINES:])
                report.sections.append((f"stdout of the Triton server ({name})", log))
    return report
