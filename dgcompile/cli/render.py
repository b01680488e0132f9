"""Tables and progress, drawn with rich. Imported by a command when it has something to show, never for ``--help``.
Whoever reports progress is also told of a Ctrl-C that got lost.

rich leaves colours out where the output is no terminal, or where NO_COLOR is set. Text that comes from files or models
goes through :func:`~dgcompile.cli.text.printable` and is never read as markup.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

from dgcompile.cli import interrupt
from dgcompile.cli.text import format_bytes, format_seconds, printable
from dgcompile.progress import Advance, Progress

PLAIN_INTERVAL = 5.0
"""Seconds between two plain lines about one task."""

WORTH_A_LINE = 0.2
"""Seconds that a task must have taken for a line to say so."""


def console(*, stderr: bool = False) -> Console:
    """A console on stdout or stderr that prints what it is given: no markup, no emoji codes, no highlighting."""
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: frozenset[str] = frozenset()) -> None:
    """Prints a table to stdout; the columns named in ``right`` are aligned to the right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    console().print(table)


def print_facts(facts: Mapping[str, str]) -> None:
    """Prints names and values in two columns to stdout."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(Text(name), Text(printable(value)))
    console().print(table)


def progress() -> Progress:
    """Progress on stderr: bars with the time left on a terminal, otherwise plain lines."""
    target = console(stderr=True)
    return BarProgress(target) if target.is_terminal else PlainProgress(target)


def _amount(done: float, total: float | None, unit: str) -> str:
    """How far a task is: ``1.2 MB of 3.4 MB``, ``7 of 42 tensors``, ``17 of 100 %``."""
    if unit == "bytes":
        return format_bytes(done) + (f" of {format_bytes(total)}" if total is not None else "")
    if unit == "%":
        done = round(done)
    return f"{done:g}" + (f" of {total:g}" if total is not None else "") + (f" {unit}" if unit else "")


class _AmountColumn(ProgressColumn):
    """``1.2 MB of 3.4 MB``."""

    def render(self, task: Task) -> Text:
        return Text(_amount(task.completed, task.total, task.fields["unit"]) if task.total or task.completed else "")


class _NoteColumn(ProgressColumn):
    """What the task says about itself at the moment."""

    def render(self, task: Task) -> Text:
        note: Callable[[], str] | None = task.fields["note"]
        return Text(printable(note()) if note else "")


class BarProgress(Progress):
    """One bar per running task, with an estimate of the time left. Finished tasks leave a line behind."""

    def __init__(self, target: Console) -> None:
        self._bars = Bars(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            _AmountColumn(),
            _NoteColumn(),
            TimeRemainingColumn(compact=True),
            console=target,
            transient=True,
        )
        self._running = 0

    @contextmanager
    def task(
        self, label: str, total: float | None = None, unit: str = "", *, note: Callable[[], str] | None = None
    ) -> Iterator[Advance]:
        """See :meth:`dgcompile.progress.Progress.task`."""
        interrupt.check()
        if not self._running:
            self._bars.start()
        self._running += 1
        started = time.monotonic()
        task = self._bars.add_task(printable(label), total=total, unit=unit, note=note)

        def advance(amount: float = 1.0, /) -> None:
            interrupt.check()
            self._bars.advance(task, amount)

        try:
            yield advance
            seconds = time.monotonic() - started
            if seconds >= WORTH_A_LINE:
                self._bars.console.print(Text(f"{printable(label)}: done in {format_seconds(seconds)}"))
        finally:
            self._bars.remove_task(task)
            self._running -= 1
            if not self._running:
                self._bars.stop()


class PlainProgress(Progress):
    """A line now and then while a task runs, and one when it is done."""

    def __init__(self, target: Console) -> None:
        self._console = target

    @contextmanager
    def task(
        self, label: str, total: float | None = None, unit: str = "", *, note: Callable[[], str] | None = None
    ) -> Iterator[Advance]:
        """See :meth:`dgcompile.progress.Progress.task`."""
        interrupt.check()
        started = spoken = time.monotonic()
        done = 0.0

        def advance(amount: float = 1.0, /) -> None:
            nonlocal done, spoken
            interrupt.check()
            done += amount
            now = time.monotonic()
            if now - spoken >= PLAIN_INTERVAL:
                spoken = now
                self._say(f"{label}: {_amount(done, total, unit)}" + (f", {note()}" if note else ""))

        yield advance
        seconds = time.monotonic() - started
        if seconds >= WORTH_A_LINE:
            self._say(f"{label}: done in {format_seconds(seconds)}")

    def _say(self, line: str) -> None:
        self._console.print(Text(printable(line)), soft_wrap=True)
