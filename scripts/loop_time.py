"""Times what the generation loop itself costs: Python between two engine calls, at the published model's shapes.

The session is a stub whose steps compute nothing, so that what is left is the loop, its random numbers and its
decisions: `generate`, which runs prompts together, and `Scheduler`, which serves. Each is timed with warm caches, and
with caches that the "engine" has filled with something else, as one on the CPU does; a GPU leaves them warm.

    python scripts/loop_time.py
    python scripts/loop_time.py --rows 1 --json
    python scripts/loop_time.py --bundle bundles/sudoku      # also around a real engine, of the cpu target

The figures are this machine's; nothing asserts them.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

# The model's shape belongs to the tests, which are not installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dgcompile.bundle import Bundle
from dgcompile.errors import DgcompileError
from dgcompile.generation_config import GenerationConfig
from dgcompile.model_spec import ModelSpec
from dgcompile.runtime.kv_cache import KVCache
from dgcompile.runtime.loop import generate
from dgcompile.runtime.onnxruntime_session import OnnxRuntimeSession
from dgcompile.runtime.row import FinishReason, Row
from dgcompile.runtime.scheduler import Job, Scheduler
from dgcompile.runtime.session import Batch, HostBatch, Session
from tests.model_config import published_config

EVICTED_BYTES = 96 << 20
"""Written by a step that empties the caches: three times the 32 MB of last-level cache that a core of an EPYC sees."""

PROMPT_TOKENS = 100


class StubSession:
    """A session of the published shapes whose engine does nothing.

    Args:
        evict: whether a step empties the processor's caches.
    """

    max_batch = None
    max_context = 8192

    def __init__(self, evict: bool) -> None:
        self.spec = ModelSpec.from_config(published_config())
        self._evicted = np.zeros(EVICTED_BYTES if evict else 0, dtype=np.uint8)

    def new_batch(self, rows: int, capacity: int) -> HostBatch:
        """A real batch; the operating system gives its cache no memory, as nobody writes to it."""
        return HostBatch(self.spec, KVCache(self.spec, rows, capacity, np.float32), np.float32)

    def encode(
        self, batch: Batch, input_ids: npt.NDArray[np.int32], input_length: npt.NDArray[np.int32], first: int = 0
    ) -> None:
        """Counts the tokens and forgets them."""
        batch.cache.past_length[first : first + len(input_ids)] += input_length

    def denoise(self, batch: Batch, first: int, last: int) -> None:
        """Makes the next canvas the current one."""
        self._evicted += 1
        batch.swap()


class TimedSession:
    """A session that notes how long it was not in use.

    Attributes:
        step_gaps: seconds between two steps of a canvas.
        canvas_gaps: seconds between two canvases outside the encoder call: the answer is taken, the next one drawn.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.spec, self.max_context, self.max_batch = session.spec, session.max_context, session.max_batch
        self.new_batch = session.new_batch
        self.step_gaps: list[float] = []
        self.canvas_gaps: list[float] = []
        self._left_at: float | None = None
        self._before_encode: float | None = None

    def encode(
        self, batch: Batch, input_ids: npt.NDArray[np.int32], input_length: npt.NDArray[np.int32], first: int = 0
    ) -> None:
        entered = time.perf_counter()
        self.session.encode(batch, input_ids, input_length, first)
        if self._left_at is not None:  # else it is the prompt
            self._before_encode = entered - self._left_at
            self._left_at = time.perf_counter()

    def denoise(self, batch: Batch, first: int, last: int) -> None:
        entered = time.perf_counter()
        if self._before_encode is not None and self._left_at is not None:
            self.canvas_gaps.append(self._before_encode + entered - self._left_at)
            self._before_encode = None
        elif self._left_at is not None:
            self.step_gaps.append(entered - self._left_at)
        self.session.denoise(batch, first, last)
        self._left_at = time.perf_counter()


class Waiting:
    """Who waits for the scheduler's answers; the last one closes it."""

    def __init__(self, scheduler: Scheduler, count: int) -> None:
        self.scheduler = scheduler
        self.count = count

    def is_cancelled(self) -> bool:
        return False

    def on_canvas(self, job: Job, token_ids: list[int]) -> bool:
        return False

    def on_finish(self, job: Job, finish_reason: FinishReason) -> None:
        self.count -= 1
        if not self.count:
            self.scheduler.close()

    def on_cancelled(self) -> None:
        raise AssertionError("nobody cancels")

    def on_error(self, error: DgcompileError) -> None:
        raise error


def run_generate(session: TimedSession, rows: int, config: GenerationConfig) -> None:
    """All rows by `generate`, nobody watching."""
    generate(session, [[1] * PROMPT_TOKENS] * rows, config, list(range(rows)))


def run_scheduler(session: TimedSession, rows: int, config: GenerationConfig) -> None:
    """All rows by a scheduler, as a server runs it."""
    scheduler = Scheduler(session, rows=rows, queue_limit=rows)
    waiting = Waiting(scheduler, rows)
    for seed in range(rows):
        scheduler.submit(Row(session.spec, session.max_context, [1] * PROMPT_TOKENS, config, seed), waiting)
    scheduler.run()


LOOPS: dict[str, Callable[[TimedSession, int, GenerationConfig], None]] = {
    "generate": run_generate,
    "scheduler": run_scheduler,
}


def measure(loop: str, rows: int, engine: str, inner: Session, canvases: int, steps: int) -> dict[str, Any]:
    """One loop's time per canvas, and per denoising step: the mean of each canvas's, their median and extremes."""
    session = TimedSession(inner)
    config = GenerationConfig(
        max_new_tokens=canvases * session.spec.canvas_length,
        max_denoising_steps=steps,
        eos_token_ids=(),
        stability_threshold=None,  # each canvas takes all its steps, whatever comes of them
    )
    LOOPS[loop](session, rows, config)
    wanted = (canvases * (steps - 1), canvases - 1)
    if (len(session.step_gaps), len(session.canvas_gaps)) != wanted:
        raise AssertionError(f"{len(session.step_gaps)} steps, {len(session.canvas_gaps)} canvases instead of {wanted}")
    # Random numbers are drawn for several steps at once, so a typical step is not what steps cost on average.
    of_canvases = np.array(session.step_gaps).reshape(canvases, steps - 1).mean(axis=1)
    return {
        "engine": engine,
        "loop": loop,
        "rows": rows,
        "step_us": round(1e6 * float(np.median(of_canvases)), 1),
        "min_us": round(1e6 * float(of_canvases.min()), 1),
        "max_us": round(1e6 * float(of_canvases.max()), 1),
        "longest_us": round(1e6 * max(session.step_gaps), 1),
        "canvas_us": round(1e6 * statistics.median(session.canvas_gaps), 1),
    }


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.option("--rows", "rows_list", multiple=True, type=click.IntRange(1, 64), default=(1, 8), help="Rows of a batch.")
@click.option("--canvases", default=6, type=click.IntRange(3), help="Canvases of an answer.")
@click.option("--steps", default=48, type=click.IntRange(3), help="Denoising steps of a canvas.")
@click.option("--bundle", type=click.Path(path_type=Path, exists=True), help="Also time around this bundle's engine.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(rows_list: tuple[int, ...], canvases: int, steps: int, bundle: Path | None, as_json: bool) -> None:
    """Time between two engine calls of the generation loops, in microseconds."""
    engines: dict[str, Session] = {"stub": StubSession(evict=False), "cold stub": StubSession(evict=True)}
    if bundle is not None:
        engines["bundle"] = OnnxRuntimeSession.open(Bundle.open(bundle), threads=1)
    results = [
        measure(loop, rows, name, engine, canvases, steps)
        for rows in rows_list
        for loop in LOOPS
        for name, engine in engines.items()
    ]
    if as_json:
        click.echo(json.dumps({"canvases": canvases, "steps": steps, "results": results}))
        return
    table = Table(title=f"between two engine calls, {canvases} canvases of {steps} steps")
    for name in results[0]:
        table.add_column(name.replace("_", " "), justify="right")
    for result in results:
        table.add_row(*(str(value) for value in result.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
