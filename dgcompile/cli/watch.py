"""The live view of ``generate --watch``: the canvas after each denoising step, on stderr."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from dgcompile.cli.render import console
from dgcompile.cli.text import format_seconds, printable

if TYPE_CHECKING:
    from dgcompile.generation_config import GenerationConfig
    from dgcompile.runtime.loop import StepEvent
    from dgcompile.runtime.pipeline import Pipeline

ACCEPTED, GUESS = "bold", "dim italic"
"""Styles of the canvas: tokens that were kept, and the best guess where the canvas holds noise again."""


@contextmanager
def watching(pipeline: Pipeline, config: GenerationConfig) -> Iterator[Callable[[StepEvent], None]]:
    """Gives the ``on_step`` of one generation: a live canvas on a terminal, otherwise one plain line per step."""
    target = console(stderr=True)
    view = _View(pipeline, config, target)
    if not target.is_terminal:
        yield view.print_line
        return
    # Transient: the finished text goes to stdout when the view is gone.
    with Live(console=target, transient=True, auto_refresh=False) as live:

        def on_step(event: StepEvent) -> None:
            live.update(view.draw(event), refresh=True)

        yield on_step


class _View:
    """Turns the steps of one row into lines and pictures."""

    def __init__(self, pipeline: Pipeline, config: GenerationConfig, target: Console) -> None:
        self._pipeline = pipeline
        self._steps = config.max_denoising_steps
        self._eos = config.eos_token_ids
        self._console = target
        self._started = time.monotonic()
        self._committed: list[int] = []
        self._canvas = 0
        self._argmax: list[int] = []

    def status(self, event: StepEvent) -> str:
        """``canvas 1, step 3 of 48: 200 of 256 accepted, mean entropy 0.12 nats, 400 tokens/s, 0.5 s``."""
        self._follow(event)
        seconds = time.monotonic() - self._started
        accepted = int(event.accepted[0].sum())
        speed = (len(self._committed) + accepted) / seconds
        done = ", converged" if event.converged[0] else ""
        return (
            f"canvas {event.canvas + 1}, step {event.step} of {self._steps}: {accepted} of "
            f"{event.accepted.shape[1]} accepted, mean entropy {float(event.entropy[0].mean()):.3f}, "
            f"{speed:.0f} tokens/s, {format_seconds(seconds)}{done}"
        )

    def print_line(self, event: StepEvent) -> None:
        """One plain line."""
        self._console.print(self.status(event), soft_wrap=True)

    def draw(self, event: StepEvent) -> Group:
        """The end of the text so far, the canvas in two styles, and the status line; no taller than the terminal."""
        status = Text(self.status(event))
        text = Text(printable(self._pipeline.decode(self._committed)))
        for accepted, ids in self._runs(event):
            text.append(printable(self._pipeline.decode(ids)), ACCEPTED if accepted else GUESS)
        width, height = self._console.size
        lines = text.wrap(self._console, width)
        return Group(*lines[-max(1, height - 3) :], status)

    def _follow(self, event: StepEvent) -> None:
        """Keeps the argmax of the last step: it becomes text when the next canvas begins."""
        if event.canvas != self._canvas:
            self._committed += self._argmax
            self._canvas = event.canvas
        self._argmax = event.argmax_ids[0].tolist()

    def _runs(self, event: StepEvent) -> Iterator[tuple[bool, list[int]]]:
        """Stretches of the canvas up to its first accepted end of text: (accepted, token ids).

        The tokens are the most probable ones, which become the text. Neighbours are decoded together, because a
        character may span several tokens.
        """
        accepted_ones = event.accepted[0] | event.converged[0]
        tokens = list(zip(self._argmax, accepted_ones.tolist(), strict=True))
        end = next((place for place, (token, kept) in enumerate(tokens) if kept and token in self._eos), len(tokens))
        for accepted, run in groupby(tokens[:end], key=lambda pair: pair[1]):
            yield accepted, [token for token, _ in run]
