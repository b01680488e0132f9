"""``scripts/measure.py`` and ``measure_build.py``: what a command takes, processes that it starts included."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))

from measure import DONE, measure, seconds_of

from dgcompile.cli.text import format_seconds

SCRIPT = Path(__file__).parent.parent / "scripts" / "measure_build.py"
MB = 1_000_000

CHILD = """
import pathlib, sys, time
held = bytearray(60_000_000)  # zeros count only once they are touched
held[::4096] = b"1" * len(held[::4096])
file = pathlib.Path(sys.argv[1])
file.write_bytes(held[:5_000_000])
file.read_bytes()
time.sleep(0.5)
"""

PARENT = f"""
import subprocess, sys, time
print("begin", flush=True)
time.sleep(0.5)
subprocess.run([sys.executable, "-c", {CHILD!r}, sys.argv[1]], check=True)
print("child's work: 1 of 2", file=sys.stderr)
print("child's work: done in 0.40 s", file=sys.stderr)
sys.exit(3)
"""


def test_processes_are_measured_with_their_children(tmp_path: Path) -> None:
    done = measure([sys.executable, "-c", PARENT, str(tmp_path / "file")])
    assert (done.exit_code, done.output) == (3, "begin\n")
    assert done.errors.splitlines()[-1] == "child's work: done in 0.40 s"
    assert list(done.parts) == ["child's work"]
    for part in (done.whole, done.parts["child's work"]):
        assert 60 * MB < part.own < part.resident < 200 * MB
        assert part.mapped <= part.resident
    assert done.whole.seconds > 1 and done.whole.read >= 5 * MB and done.whole.written >= 5 * MB
    assert done.parts["child's work"].seconds == pytest.approx(0.4)


def test_a_command_can_be_killed_with_its_children(tmp_path: Path) -> None:
    file = tmp_path / "file"
    sleeper = "import subprocess; subprocess.run(['sleep', '300'])"
    done = measure(
        [sys.executable, "-c", f"open({str(file)!r}, 'w').close(); {sleeper}"], stop_when=file.exists
    )  # it returns only once the last process that could write to the pipes is gone
    assert done.exit_code == -signal.SIGKILL and done.whole.seconds < 250


@pytest.mark.parametrize("seconds", [0.04, 7.3, 12, 185, 7800])
def test_times_are_read_as_dgcompile_prints_them(seconds: float) -> None:
    found = DONE.fullmatch(f"check x: 1: done in {format_seconds(seconds)}\n")
    assert found is not None and found["label"] == "check x: 1"
    assert seconds_of(found) == pytest.approx(seconds)


def test_work_began_no_earlier_than_the_command() -> None:
    script = "import sys; sys.stderr.write('work: done in 2 h 10 min\\n')"
    done = measure([sys.executable, "-c", script])
    assert 0 < done.parts["work"].seconds <= done.whole.seconds


def test_a_refused_build_is_measured_and_its_exit_code_passed_on(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    given = ["/no/such/checkpoint", "--target", "cpu", "-o", str(tmp_path / "b")]
    command = [sys.executable, str(SCRIPT), *given, "--report", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "/no/such/checkpoint" in done.stderr
    found = json.loads(report.read_text())
    assert found == json.loads(done.stdout)
    assert found["exit_code"] == 2 and found["seconds"] > 0
    assert 0 < found["peak_own_bytes"] <= found["peak_resident_bytes"] < 4e9
    assert found["command"].startswith("dgcompile build /no/such/checkpoint --target cpu")
