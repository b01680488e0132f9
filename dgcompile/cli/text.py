"""Plain text helpers that need no rich."""

from __future__ import annotations

import json
import sys
import unicodedata
from typing import Any

KEPT_CONTROLS = frozenset("\n\t")


def printable(text: str) -> str:
    """``text`` with control characters spelled out, so that a file or a model cannot steer the terminal."""
    return "".join(
        character
        if character in KEPT_CONTROLS or unicodedata.category(character) != "Cc"
        else character.encode("unicode_escape").decode()
        for character in text
    )


def print_json(value: Any) -> None:
    """Writes ``value`` to stdout as one JSON document."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def format_bytes(size: float) -> str:
    """``size`` in the decimal unit that keeps it below 1000: ``5.3 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 999.5:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def format_seconds(seconds: float) -> str:
    """``seconds`` as a person says it: ``0.04 s``, ``1.2 s``, ``12 s``, ``3 min 05 s``, ``2 h 10 min``."""
    if seconds < 0.995:
        return f"{seconds:.2f} s"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
