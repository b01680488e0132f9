"""Sessions for the runtime's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from dgcompile.runtime.onnxruntime_session import OnnxRuntimeSession
from tests.runtime.toy_model import toy_spec, write_toy_graphs


@pytest.fixture(scope="session")
def toy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy model's graphs. Shared by all tests: do not write into it."""
    return write_toy_graphs(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="session")
def toy_session(toy_folder: Path) -> OnnxRuntimeSession:
    """The toy model, loaded."""
    return OnnxRuntimeSession(toy_folder, toy_spec(), max_context=128, threads=1)
