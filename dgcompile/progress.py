"""How long work tells what it is doing: a stage opens a task and advances it; whoever started the stage renders it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol


class Advance(Protocol):
    """Reports that a task got further."""

    def __call__(self, amount: float = 1.0, /) -> None:
        """Adds ``amount`` of the task's unit to what is done."""


class Progress:
    """Receives the progress of a build, a conversion or a generation. This base class is silent: subclass it to render.

    Tasks may be nested and may end early by an exception. Calls come from the thread that does the work.
    """

    @contextmanager
    def task(
        self, label: str, total: float | None = None, unit: str = "", *, note: Callable[[], str] | None = None
    ) -> Iterator[Advance]:
        """One piece of work, as a context manager that gives the function which reports progress.

        Args:
            label: what is being done, in the user's words ("weights", "check denoiser.onnx").
            total: amount of work in ``unit``; None when nobody can tell.
            unit: what is counted ("bytes", "tensors"); empty for bare steps.
            note: asked for a few words about the work as it is now ("512 tokens/s") whenever it is shown; any thread
                may ask.
        """
        del label, total, unit, note

        def silent(amount: float = 1.0, /) -> None:
            del amount

        yield silent
