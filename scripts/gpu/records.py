"""What a part of the check found out, as JSON lines on its standard output: they outlive a killed process."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

MARK = "gpu_check>"
"""Begins each line that is a record; anything else on the output is chatter of libraries."""


def emit(kind: str, name: str, **fields: Any) -> None:
    """Print one record. Kinds: "device", "check", "timing", "info", "skipped"; an unfinished part becomes "error"."""
    record = {"kind": kind, "name": name, **fields}
    for key, value in record.items():
        if isinstance(value, float) and not math.isfinite(value):
            record[key] = None  # JSON knows neither NaN nor infinity
    print(MARK + json.dumps(record, allow_nan=False), flush=True)


def check(name: str, error: float, bound: float, reason: str, **fields: Any) -> None:
    """Print the outcome of a numeric check: passed when ``error <= bound``; NaN and infinity never do.

    Args:
        error: what was measured.
        bound: what it may be at most.
        reason: why the bound is what it is.
    """
    passed = math.isfinite(error) and error <= bound
    emit("check", name, error=error, bound=bound, passed=passed, why=reason, **fields)


def skip(name: str, reason: str) -> None:
    """Print that something was left out, and why."""
    emit("skipped", name, reason=reason)


def parse(line: str) -> dict[str, Any] | None:
    """The record on a line of output, or None."""
    if not line.startswith(MARK):
        return None
    record: dict[str, Any] = json.loads(line.removeprefix(MARK))
    return record


def log(message: str) -> None:
    """Progress for whoever watches."""
    print(message, file=sys.stderr, flush=True)
