"""Times what the generation loop itself costs: Python between two engine calls, at the published model's shapes.

The session is a stub whose steps compute nothing, so that what is left is the loop, its random numbers and its
decisions: `generate`, which runs prompts together, and `Scheduler`, which serves. Each is timed with warm caches, and
with caches that the "engine" has filled with something else, as a real one does.

    python scripts/loop_time.py
    python scripts/loop_time.py --rows 1 --json

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

from dgcompile.errors import DgcompileError
from dgcompile.generation_config import GenerationConfig
from dgcompile.model_spec import ModelSpec
from dgcompile.runtime.kv_cache import KVCache
from dgcompile.runtime.loop import generate
from dgcompile.runtime.row import FinishReason, Row
from dgcompile.runtime.scheduler import Job, Scheduler
from dgcompile.runtime.session import Batch, HostBatch
from tests.model_config import published_config

EVICTED_BYTES = 96 << 20
"""Written by a step that empties the caches: three times the 32 MB of last-level cache that a core of an EPYC sees."""

PROMPT_TOKENS = 100


class StubSession:
    """A session of the published shapes whose engine does nothing, and which notes how long it was not in use.

    Args:
        evict: whether a step empties the processor's caches.

    Attributes:
        step_gaps: seconds between two steps of a canvas.
        canvas_gaps: seconds between two canvases outside the encoder call: the answer is taken, the next one drawn.
    """

    max_batch = None
    max_context = 8192

    def __init__(self, evict: bool) -> None:
        self.spec = ModelSpec.from_config(published_config())
        self.step_gaps: list[float] = []
        self.canvas_gaps: list[float] = []
        self._evicted = np.zeros(EVICTED_BYTES if evict else 0, dtype=np.uint8)
        self._left_at: float | None = None
        self._before_encode: float | None = None

    def new_batch(self, rows: int, capacity: int) -> HostBatch:
        """A real batch; the operating system gives its cache no memory, as nobody writes to it."""
        batch = HostBatch(self.spec, KVCache(self.spec, rows, capacity, np.float32), np.float32)
        batch.entropy.fill(1.0)  # never sure, so that each canvas takes all its steps
        return batch

    def encode(
        self, batch: Batch, input_ids: npt.NDArray[np.int32], input_length: npt.NDArray[np.int32], first: int = 0
    ) -> None:
        """Counts the tokens and forgets them."""
        entered = time.perf_counter()
        batch.cache.past_length[first : first + len(input_ids)] += input_length
        if self._left_at is not None:  # else it is the prompt
            self._before_encode = entered - self._left_at
            self._left_at = time.perf_counter()

    def denoise(self, batch: Batch, first: int, last: int) -> None:
        """Makes the next canvas the current one."""
        entered = time.perf_counter()
        if self._before_encode is not None and self._left_at is not None:
            self.canvas_gaps.append(self._before_encode + entered - self._left_at)
            self._before_encode = None
        elif self._left_at is not None:
            self.step_gaps.append(entered - self._left_at)
        self._evicted += 1
        batch.swap()
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


def run_generate(session: StubSession, rows: int, config: GenerationConfig) -> None:
    """All rows by `generate`, nobody watching."""
    generate(session, [[1] * PROMPT_TOKENS] * rows, config, list(range(rows)))


def run_scheduler(session: StubSession, rows: int, config: GenerationConfig) -> None:
    """All rows by a scheduler, as a server runs it."""
    scheduler = Scheduler(session, rows=rows, queue_limit=rows)
    waiting = Waiting(scheduler, rows)
    for seed in range(rows):
        scheduler.submit(Row(session.spec, session.max_context, [1] * PROMPT_TOKENS, config, seed), waiting)
    scheduler.run()


LOOPS: dict[str, Callable[[StubSession, int, GenerationConfig], None]] = {
    "generate": run_generate,
    "scheduler": run_scheduler,
}


def measure(loop: str, rows: int, evict: bool, canvases: int, steps: int) -> dict[str, Any]:
    """One loop's time per denoising step and per canvas."""
    session = StubSession(evict)
    config = GenerationConfig(
        max_new_tokens=canvases * session.spec.canvas_length, max_denoising_steps=steps, eos_token_ids=()
    )
    LOOPS[loop](session, rows, config)
    wanted = (canvases * (steps - 1), canvases - 1)
    if (len(session.step_gaps), len(session.canvas_gaps)) != wanted:
        raise AssertionError(f"{len(session.step_gaps)} steps, {len(session.canvas_gaps)} canvases instead of {wanted}")
    microseconds = [1e6 * gap for gap in session.step_gaps]
    tenths = statistics.quantiles(microseconds, n=10)
    return {
        "loop": loop,
        "rows": rows,
        "caches": "cold" if evict else "warm",
        "step_us": round(statistics.median(microseconds), 1),
        "p10_us": round(tenths[0], 1),
        "p90_us": round(tenths[-1], 1),
        "canvas_us": round(1e6 * statistics.median(session.canvas_gaps), 1),
    }


@click.command(context_settings={"show_default": True})
@click.option("--rows", "rows_list", multiple=True, type=click.IntRange(1, 64), default=(1, 8), help="Rows of a batch.")
@click.option("--canvases", default=6, type=click.IntRange(3), help="Canvases of an answer.")
@click.option("--steps", default=48, type=click.IntRange(3), help="Denoising steps of a canvas.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(rows_list: tuple[int, ...], canvases: int, steps: int, as_json: bool) -> None:
    """Median time between two engine calls of the generation loops, in microseconds."""
    results = [
        measure(loop, rows, evict, canvases, steps) for rows in rows_list for loop in LOOPS for evict in (False, True)
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
