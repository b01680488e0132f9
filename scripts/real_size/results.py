"""What a check found: rows of a table, each with the bound that it is held against."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

FILE_WIDTH = 150
"""Columns of a table that goes to no terminal."""


@dataclass(frozen=True)
class Row:
    """One figure.

    Attributes:
        what: was measured.
        found: its value, for people.
        bound: what it may be, for people; "" for a figure that nothing is asked of.
        holds: whether it is within the bound; None where nothing is asked.
    """

    what: str
    found: str
    bound: str = ""
    holds: bool | None = None


def at_most(what: str, value: float, limit: float, shown: Callable[[float], str]) -> Row:
    """A figure below a limit."""
    return Row(what, shown(value), f"under {shown(limit)}", value < limit)


def equal(what: str, value: object, expected: object) -> Row:
    """A figure that is known beforehand."""
    return Row(what, f"{value}", f"{expected}", value == expected)


def near(what: str, value: float, expected: float, tolerance: float, shown: Callable[[float], str]) -> Row:
    """A figure within ``tolerance``, a share of ``expected``, of what is expected."""
    holds = abs(value - expected) <= tolerance * expected
    return Row(what, shown(value), f"{shown(expected)} ± {100 * tolerance:g} %", holds)


@dataclass
class Results:
    """All rows, and the figures behind them, check by check.

    Attributes:
        about: the machine and the run.
        rows: by check.
        figures: JSON data by check.
        file: what is written after each check; None for nothing.
    """

    about: dict[str, Any]
    file: Path | None = None
    rows: dict[str, list[Row]] = field(default_factory=dict)
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def failures(self) -> int:
        """Rows that are out of bounds."""
        return sum(row.holds is False for rows in self.rows.values() for row in rows)

    def write(self) -> None:
        """Writes all of it as JSON."""
        if self.file is None:
            return
        checks = {
            name: {"rows": [asdict(row) for row in rows], "figures": self.figures.get(name, {})}
            for name, rows in self.rows.items()
        }
        self.file.write_text(json.dumps({**self.about, "failures": self.failures, "checks": checks}, indent=2) + "\n")

    def print(self) -> None:
        """Prints the table to stdout."""
        console = Console()
        if not console.is_terminal:
            console = Console(width=FILE_WIDTH)
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        for name in ("check", "what", "found", "bound", ""):
            table.add_column(name, overflow="fold")
        verdicts = {None: Text(""), True: Text("holds", "green"), False: Text("DOES NOT HOLD", "bold red")}
        for check, rows in self.rows.items():
            for index, row in enumerate(rows):
                name = check if index == 0 else ""
                cells = (Text(cell) for cell in (name, row.what, row.found, row.bound))
                table.add_row(*cells, verdicts[row.holds], end_section=index == len(rows) - 1)
        console.print(table)
