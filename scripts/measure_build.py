"""Runs ``dgcompile build`` and measures it: seconds and peak memory of the whole process tree, per stage.

    python scripts/measure_build.py CHECKPOINT --target rtx5090 -o BUNDLE [--report FILE.json]

Everything but --report is passed on. Memory is sampled every 50 ms: "resident" is the sum of the processes' resident
sets, mapped files included; "own" leaves out the pages of files, which the system can drop at any time.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import threading
import time
from datetime import date
from pathlib import Path

import psutil

from dgcompile import __version__

INTERVAL = 0.05


def memory(root: psutil.Process) -> tuple[int, int]:
    """Resident bytes of a process and all its descendants: all, and without the pages of files."""
    resident = own = 0
    for process in [root, *root.children(recursive=True)]:
        try:
            found = process.memory_info()
        except psutil.NoSuchProcess:
            continue
        resident += found.rss
        own += found.rss - found.shared
    return resident, own


def main() -> int:
    """Entry point; the exit code is the build's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=Path, help="JSON file to write")
    options, rest = parser.parse_known_args()
    command = [sys.executable, "-m", "dgcompile", "build", *rest]
    started = time.monotonic()
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    stage, done = "start", False
    peaks: dict[str, dict[str, float]] = {}

    def sample() -> None:
        root = psutil.Process(process.pid)
        while not done:
            try:
                resident, own = memory(root)
            except psutil.NoSuchProcess:
                return
            peak = peaks.setdefault(stage, {"resident_bytes": 0, "own_bytes": 0, "ended_s": 0})
            peak["resident_bytes"] = max(peak["resident_bytes"], resident)
            peak["own_bytes"] = max(peak["own_bytes"], own)
            peak["ended_s"] = round(time.monotonic() - started, 1)
            time.sleep(INTERVAL)

    sampler = threading.Thread(target=sample)
    sampler.start()
    for line in process.stderr:
        print(line, end="", file=sys.stderr)
        # "weights: 1 of 9 bytes" while it runs; the line that says it is done belongs to it too.
        if found := re.match(r"([a-z ]+): ", line):
            stage = found[1]
    code = process.wait()
    done = True
    sampler.join()
    report = {
        "command": " ".join(["dgcompile build", *rest]),
        "date": date.today().isoformat(),
        "dgcompile": __version__,
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": psutil.cpu_count(),
            "memory_bytes": psutil.virtual_memory().total,
            "system": platform.platform(),
        },
        "exit_code": code,
        "seconds": round(time.monotonic() - started, 1),
        "peak_resident_bytes": max((peak["resident_bytes"] for peak in peaks.values()), default=0),
        "peak_own_bytes": max((peak["own_bytes"] for peak in peaks.values()), default=0),
        "stages": peaks,
    }
    text = json.dumps(report, indent=2)
    if options.report:
        options.report.write_text(text + "\n")
    print(text)
    return code


if __name__ == "__main__":
    sys.exit(main())
