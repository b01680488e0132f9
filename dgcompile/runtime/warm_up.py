"""Running every shape once before the first request does: compiling kernels and capturing graphs takes seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np

from dgcompile.progress import Progress
from dgcompile.runtime.session import Batch, Session

_RUNS = 4  # of each step: both directions between the copies, each once as it is and once more as a graph
_TIMED_RUNS = 3
_PROMPT_WIDTHS = (16, 32, 64, 128, 256, 512)  # what a GPU session pads encoder calls to, up to ENCODE_CHUNK


def warm_up(session: Session, batch: Batch, rows: int, progress: Progress | None = None) -> float:
    """Runs the steps and encoder calls that requests will need. The rows are empty before and after.

    Args:
        session: the loaded model.
        batch: one of its batches.
        rows: rows of the batch.
        progress: told how far it got.

    Returns:
        What an encoder call costs whatever it takes, in denoising steps of all rows: with calls of 1 and of B rows
        taking t(1) and t(B), the intercept of the line through them, (B t(1) - t(B)) / (B - 1). Zero on a CPU, which is
        busy with the rows and not with reading weights, and of which one row of each is run, to see that it works.
    """
    length = session.spec.canvas_length
    if session.max_batch is None:
        with (progress or Progress()).task("warm up", 2) as advance:
            _encode(session, batch, 1, length)
            advance()
            _denoise(session, batch, 1)
            advance()
        batch.cache.clear_row(0)
        return 0.0
    widths = [width for width in _PROMPT_WIDTHS if width != length]
    with (progress or Progress()).task("warm up", 2 * rows + len(widths)) as advance:
        for count in range(1, rows + 1):
            _encode(session, batch, count, length)
            advance()
        for width in widths:
            _encode(session, batch, 1, width)
            advance()
        for count in range(1, rows + 1):
            for _ in range(_RUNS):
                _denoise(session, batch, count)
            advance()
    if rows == 1:
        return 0.0
    one, all_rows = (_seconds(partial(_encode, session, batch, count, length)) for count in (1, rows))
    fixed = max(0.0, (rows * one - all_rows) / (rows - 1))
    return fixed / _seconds(partial(_denoise, session, batch, rows))


def _encode(session: Session, batch: Batch, rows: int, width: int) -> None:
    for row in range(rows):
        batch.cache.clear_row(row)
    width = min(width, session.max_context)
    session.encode(batch, np.zeros((rows, width), dtype=np.int32), np.full(rows, width, dtype=np.int32))
    for row in range(rows):
        batch.cache.clear_row(row)


def _denoise(session: Session, batch: Batch, rows: int) -> None:
    batch.start_canvas(np.zeros((rows, session.spec.canvas_length), dtype=np.int32))
    session.denoise(batch, 0, rows - 1)


def _seconds(run: Callable[[], None]) -> float:
    """Median time of a few runs."""
    times = []
    for _ in range(_TIMED_RUNS):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return sorted(times)[_TIMED_RUNS // 2]
