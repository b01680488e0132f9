"""One server that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving.openai.helpers import Served, serving


@pytest.fixture(scope="session")
def served(bundle: Path) -> Iterator[Served]:
    """A server over the tiny random bundle, with 4 rows and no key."""
    with serving(bundle, rows=4) as server:
        yield server
