"""The scripts are no package that gets installed: put their folder where `import example` finds it."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """So small a model gains nothing from a second thread, and threads that wait for each other crawl on a busy
    machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
