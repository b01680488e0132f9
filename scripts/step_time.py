"""Times the denoising step of a bundle at one past length and several cache capacities.

A step that copied its KV cache would take time in proportion to the capacity; one that reads only what is filled does
not. The figures are this machine's; nothing asserts them.

    python scripts/step_time.py BUNDLE --past 64 --capacity 128 --capacity 4096 --capacity 65536
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from dgcompile.bundle import Bundle
from dgcompile.runtime.onnxruntime_session import OnnxRuntimeSession
from dgcompile.runtime.random_numbers import RowRandom
from dgcompile.runtime.session import Batch


def filled_batch(session: OnnxRuntimeSession, capacity: int, past: int) -> Batch:
    """A batch of one row with ``past`` encoded random tokens and a canvas under way, in a cache of ``capacity``."""
    spec = session.spec
    random = RowRandom(0, spec.canvas_length, spec.vocab_size)
    batch = session.new_batch(1, capacity)
    tokens = np.random.default_rng(0).integers(spec.vocab_size, size=(1, past)).astype(np.int32)
    session.encode(batch, tokens, np.array([past], np.int32))
    batch.start_canvas(random.initial_canvas(0)[None])
    batch.uniform[0], batch.noise_ids[0] = random.step(0, 1)
    batch.entropy_bound.fill(0.1)
    return batch


def milliseconds(session: OnnxRuntimeSession, batch: Batch) -> float:
    """Wall time of one denoising step."""
    start = time.perf_counter()
    session.denoise(batch, 0, 0)
    return (time.perf_counter() - start) * 1e3


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.argument("bundle", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--past", default=64, help="Tokens in the cache.")
@click.option("--capacity", "capacities", multiple=True, type=int, default=(128, 1024, 8192, 65536), help="Cache rows.")
@click.option("--runs", default=51, help="Timed steps for each capacity.")
@click.option("--threads", default=1, help="Threads of the engine.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(bundle: Path, past: int, capacities: tuple[int, ...], runs: int, threads: int, as_json: bool) -> None:
    """Median denoising step of BUNDLE at a fixed past length, for growing cache capacities.

    The capacities take turns, so that a machine that gets slower or faster meanwhile treats them alike.
    """
    opened = Bundle.open(bundle)
    session = OnnxRuntimeSession(opened.path, opened.spec, max(capacities), threads)
    batches = {capacity: filled_batch(session, capacity, past) for capacity in capacities}
    times: dict[int, list[float]] = {capacity: [] for capacity in capacities}
    for batch in batches.values():
        for _ in range(5):
            session.denoise(batch, 0, 0)
    for _ in range(runs):
        for capacity, batch in batches.items():
            times[capacity].append(milliseconds(session, batch))
    rows = [
        {
            "capacity": capacity,
            "cache_mb": round(batches[capacity].cache.nbytes / 1e6, 2),
            "median_ms": round(statistics.median(values), 3),
            "p10_ms": round(statistics.quantiles(values, n=10)[0], 3),
            "p90_ms": round(statistics.quantiles(values, n=10)[-1], 3),
        }
        for capacity, values in times.items()
    ]
    if as_json:
        click.echo(json.dumps({"past": past, "runs": runs, "threads": threads, "rows": rows}))
        return
    table = Table(title=f"denoising step, batch 1, past {past}, {runs} runs, {threads} thread(s)")
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
