"""A contender's process: its answers, its errors, its death."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from dgcompile.bench.process import TooSlowError, Worker
from dgcompile.errors import EngineError, InputError

WORKER = """
import os, signal, subprocess, sys, time
from dgcompile.bench.command_loop import serve
from dgcompile.errors import CheckpointError, EngineError

def bad(command):
    raise CheckpointError("it is bad", expected="a good one", fix="mend it")

def odd(command):
    return {}["nothing"]

def noise(command):
    print("a library prints")
    return {"ok": 1}

def die(command):
    print("out of luck", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

def child(command):
    return {"pid": subprocess.Popen(["sleep", "600"]).pid}

serve({
    "echo": lambda command: command,
    "threads": lambda command: {"threads": os.environ["OMP_NUM_THREADS"]},
    "sleep": lambda command: time.sleep(600),
    "bad": bad, "odd": odd, "noise": noise, "die": die, "child": child,
})
"""


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    (tmp_path / "toy_worker.py").write_text(WORKER)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with Worker("the toy", "toy_worker", 3, environment) as started:
        yield started


def gone(pid: int) -> bool:
    """Whether a process ends within a few seconds."""
    for _ in range(200):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def test_answers_come_in_order_and_what_libraries_print_is_none(worker: Worker) -> None:
    assert worker.ask("echo", number=1) == {"number": 1}
    assert worker.ask("noise") == {"ok": 1}
    assert worker.ask("echo", number=2) == {"number": 2}


def test_libraries_see_the_number_of_threads(worker: Worker) -> None:
    assert worker.ask("threads") == {"threads": "3"}


def test_an_error_of_the_input_stays_one_and_names_the_contender(worker: Worker) -> None:
    with pytest.raises(InputError, match="the toy: it is bad; expected a good one; mend it"):
        worker.ask("bad")
    assert worker.ask("echo") == {}


def test_any_other_error_is_one_of_the_engine(worker: Worker) -> None:
    with pytest.raises(EngineError, match="the toy: KeyError: 'nothing'"):
        worker.ask("odd")


def test_a_worker_that_dies_is_named_with_its_last_words(worker: Worker) -> None:
    with pytest.raises(EngineError, match=r"process of the toy was ended by SIGKILL.*out of luck.*memory may not"):
        worker.ask("die")
    with pytest.raises(EngineError, match="process of the toy was ended by SIGKILL"):
        worker.ask("echo")


def test_a_worker_that_takes_too_long_is_ended(worker: Worker) -> None:
    worker.ask("echo")
    with pytest.raises(TooSlowError, match=r"the toy took more than 0\.2 s to sleep"):
        worker.ask("sleep", 0.2)
    assert gone(worker.pid)


def test_what_a_worker_started_ends_with_it(worker: Worker) -> None:
    child = worker.ask("child")["pid"]
    assert psutil.pid_exists(child)
    worker.end()
    assert gone(child) and gone(worker.pid)


def test_a_worker_in_the_middle_of_its_work_ends_with_whoever_asked(tmp_path: Path) -> None:
    (tmp_path / "toy_worker.py").write_text(WORKER)
    code = (
        "import os, sys\n"
        "from dgcompile.bench.process import Worker\n"
        f"worker = Worker('the toy', 'toy_worker', 1, {{**os.environ, 'PYTHONPATH': {str(tmp_path)!r}}})\n"
        "print(worker.pid, worker.ask('child')['pid'], flush=True)\n"
        "worker.ask('sleep')\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    parent.kill()
    parent.wait()
    assert all(map(gone, pids))
