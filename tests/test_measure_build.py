"""``scripts/measure_build.py``: passes the build on and says what it took."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "scripts" / "measure_build.py"


def test_a_refused_build_is_measured_and_its_exit_code_passed_on(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [
        sys.executable,
        SCRIPT,
        "/no/such/checkpoint",
        "--target",
        "cpu",
        "-o",
        tmp_path / "b",
        "--report",
        report,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "/no/such/checkpoint" in done.stderr
    found = json.loads(report.read_text())
    assert found == json.loads(done.stdout)
    assert found["exit_code"] == 2 and found["seconds"] > 0
    assert 0 < found["peak_own_bytes"] <= found["peak_resident_bytes"] < 4e9
    assert found["command"].startswith("dgcompile build /no/such/checkpoint --target cpu")
