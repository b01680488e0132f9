"""Facts of this machine and of this process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import psutil
import pytest

from dgcompile.bench.machine import Machine, Strangers, physical_cores, watch_memory


def test_the_machine() -> None:
    machine = Machine.this()
    assert 1 <= machine.cores == physical_cores() <= (os.cpu_count() or 1)
    assert machine.cpu and machine.memory > 1 << 28
    assert machine.packages["numpy"] == np.__version__


def test_memory_is_that_of_the_work_alone() -> None:
    size = 64 << 20
    # What was there before, and is gone, does not count.
    np.ones(3 * size, dtype=np.uint8)
    before = psutil.Process().memory_info().rss
    memory = watch_memory(lambda: (np.ones(size, dtype=np.uint8), time.sleep(0.1)))
    assert memory.peak_rss is not None and memory.peak_anonymous is not None and memory.since_start is not None
    assert 0.9 * size < memory.peak_rss - before < 1.6 * size
    assert size < memory.peak_anonymous <= memory.peak_rss * 1.01
    assert memory.since_start >= memory.peak_rss


@pytest.fixture
def burner() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    yield process
    process.kill()
    process.wait()


def test_processor_time_of_the_measured_process_is_not_that_of_others(burner: subprocess.Popen[bytes]) -> None:
    as_own, as_others = Strangers(), Strangers()
    with as_others.beside(os.getpid()), as_own.beside(burner.pid):
        time.sleep(1.0)
    own, others = as_own.processors, as_others.processors
    assert own is not None and others is not None
    assert others - own > 0.2  # the burner gets more of a processor than that, whoever else is there
