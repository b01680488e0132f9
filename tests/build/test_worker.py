"""The process that builds an engine, without the engine library."""

from __future__ import annotations

import subprocess
import sys

RESTING = """
import sys, threading, time
from dgcompile.build.tensorrt.worker import _in_fresh_thread

main = threading.main_thread().ident
places = []

def work():
    for _ in range(50):
        frame = sys._current_frames()[main]
        places.append((frame.f_code.co_name, frame.f_lasti))
        time.sleep(0.001)  # lets any thread run that would

_in_fresh_thread(work)
assert len(places) == 50
print(*set(places))
"""


def test_the_main_thread_rests_while_the_other_builds() -> None:
    # What it did beside the building thread moved Python's objects, and with them the bytes of engines.
    done = subprocess.run([sys.executable, "-c", RESTING], capture_output=True, text=True, check=True)
    places = done.stdout.strip()
    assert places.startswith("('_in_fresh_thread'") and places.count("(") == 1, places


def test_a_failure_in_the_fresh_thread_ends_the_wait() -> None:
    script = "from dgcompile.build.tensorrt.worker import _in_fresh_thread; _in_fresh_thread(lambda: 1 / 0)"
    subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, timeout=60)
