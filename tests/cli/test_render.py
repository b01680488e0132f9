"""Numbers as people read them, plain and drawn progress, and text that cannot steer the terminal."""

from __future__ import annotations

import io
import time
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from dgcompile.cli import render
from dgcompile.cli.render import BarProgress, PlainProgress
from dgcompile.cli.text import format_bytes, format_seconds, printable
from tests.cli.helpers import ESCAPE


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (999_600, "1 MB"), (51_600_000_000, "51.6 GB"), (2e15, "2e+03 TB")],
)
def test_format_bytes(size: float, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.004, "0.00 s"),
        (0.04, "0.04 s"),
        (0.996, "1.0 s"),
        (9.96, "10 s"),
        (59.6, "1 min 00 s"),
        (185, "3 min 05 s"),
        (7800, "2 h 10 min"),
    ],
)
def test_format_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@given(st.text())
def test_printable_text_has_no_control_characters_and_keeps_the_rest(text: str) -> None:
    shown = printable(text)
    assert not any(unicodedata.category(character) == "Cc" for character in shown if character not in "\n\t")
    assert [c for c in shown if not c.isascii() or c in "\n\t"] == [
        c for c in text if (not c.isascii() and unicodedata.category(c) != "Cc") or c in "\n\t"
    ]


def test_progress_says_what_a_task_notes_about_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "PLAIN_INTERVAL", 0.0)
    rates = iter(["1 token/s", f"{ESCAPE}[31m2 tokens/s"])
    out = io.StringIO()
    with PlainProgress(Console(file=out, width=80)).task("batch", 5, "lines", note=lambda: next(rates)) as advance:
        advance()
        advance()
    assert out.getvalue().splitlines()[:2] == [
        "batch: 1 of 5 lines, 1 token/s",
        "batch: 2 of 5 lines, \\x1b[31m2 tokens/s",
    ]
    out = io.StringIO()
    with BarProgress(Console(file=out, width=80, force_terminal=True)).task(
        "batch", 1000, "lines", note=lambda: f"{ESCAPE}[2J1234.5 tokens/s"
    ):
        pass
    assert "\\x1b[2J1234.5 tokens/s" in out.getvalue() and f"{ESCAPE}[2J" not in out.getvalue()


def test_plain_progress_speaks_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 101.0, 106.0, 107.0, 120.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    out = io.StringIO()
    with PlainProgress(Console(file=out, width=80)).task("weights", 4e6, "bytes") as advance:
        advance(1e6)
        advance(1e6)
        advance(1e6)
    assert out.getvalue().splitlines() == ["weights: 2 MB of 4 MB", "weights: done in 20 s"]


def test_plain_progress_says_nothing_about_a_task_that_took_no_time_or_failed() -> None:
    out = io.StringIO()
    progress = PlainProgress(Console(file=out, width=80))
    with progress.task("quick") as advance:
        advance()
    with pytest.raises(OSError), progress.task("broken"):
        raise OSError
    assert out.getvalue() == ""


def test_bars_show_amounts_and_leave_a_line_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "WORTH_A_LINE", 0.0)
    out = io.StringIO()
    progress = BarProgress(Console(file=out, width=80, force_terminal=True, color_system=None))
    with progress.task("weights [bold]", 4e6, "bytes") as advance, progress.task("tensors", 3, "tensors") as inner:
        advance(1e6)
        inner(2)
        progress._bars.refresh()
    drawn = out.getvalue()
    assert "1 MB of 4 MB" in drawn and "2 of 3 tensors" in drawn
    assert "weights [bold]: done in" in drawn, "labels are text, not markup"


def test_bars_end_when_the_work_fails() -> None:
    progress = BarProgress(Console(file=io.StringIO(), width=80, force_terminal=True))
    with pytest.raises(OSError), progress.task("weights", 10):
        raise OSError
    assert not progress._bars.live.is_started and not progress._bars.tasks


def test_tables_escape_what_they_show(capsys: pytest.CaptureFixture[str]) -> None:
    render.print_table(("name", "size"), [(f"{ESCAPE}[31m[red]evil", "1 B")], right=frozenset({"size"}))
    render.print_facts({"name": f"{ESCAPE}[2J"})
    out = capsys.readouterr().out
    assert ESCAPE not in out and "\\x1b[31m[red]evil" in out and "\\x1b[2J" in out
