"""Runs ``dgcompile build`` and measures it: seconds and peak memory of the whole process tree, per stage.

    python scripts/measure_build.py CHECKPOINT --target rtx5090 -o BUNDLE [--report FILE.json]

Everything but --report is passed on. Memory is sampled: "resident" is the sum of the processes' resident sets, mapped
files included; "own" leaves out the pages of files, which the system can drop at any time.
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import date
from pathlib import Path

from measure import machine, measure


def main() -> int:
    """Entry point; the exit code is the build's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=Path, help="JSON file to write")
    options, rest = parser.parse_known_args()
    done = measure([sys.executable, "-m", "dgcompile", "build", *rest], echo=True)
    report = {
        "command": " ".join(["dgcompile build", *rest]),
        "date": date.today().isoformat(),
        "machine": machine(),
        **done.to_values(),
    }
    text = json.dumps(report, indent=2)
    if options.report:
        options.report.write_text(text + "\n")
    print(text)
    return done.exit_code


if __name__ == "__main__":
    sys.exit(main())
