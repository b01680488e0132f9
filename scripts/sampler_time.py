"""Times the sampler alone at a real vocabulary: as traced, and in one pass as the engines of the cpu target have it, in
turns; each in a process of its own, whose peak memory is told too.

    python scripts/sampler_time.py --vocab 262144 --hidden 64

The products with the embedding table are part of it; with a small hidden size the chain around them is what counts.
The figures are this machine's; nothing asserts them.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

# The sampler alone is made by the tests, which are not installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

KINDS = ("traced", "streamed")


def _serve(kind: str, folder: str, inputs: dict[str, np.ndarray], threads: int, connection: Connection) -> None:
    """Runs one of the two whenever asked; answers milliseconds, and at the end the peak memory in MB."""
    import onnxruntime

    from dgcompile.runtime.onnxruntime_session import LOADING, session_options

    model = (Path(folder) / f"{kind}.onnx").read_bytes()
    session = onnxruntime.InferenceSession(model, session_options(Path(folder), threads), **LOADING)
    connection.send("ready")
    while connection.recv():
        start = time.perf_counter()
        session.run(None, inputs)
        connection.send((time.perf_counter() - start) * 1e3)
    status = Path("/proc/self/status").read_text()
    connection.send(int(status.split("RssAnon:")[0].split("VmHWM:")[1].split()[0]) / 1e3)


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.option("--vocab", default=262144, help="Tokens of the vocabulary.")
@click.option("--hidden", default=64, help="Hidden size; 2816 is the published one.")
@click.option("--canvas", default=256, help="Positions of a canvas.")
@click.option("--rows", default=1, help="Rows of the batch.")
@click.option("--threads", default=2, help="Threads of each call.")
@click.option("--turns", default=7, help="Timed calls of each.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(vocab: int, hidden: int, canvas: int, rows: int, threads: int, turns: int, as_json: bool) -> None:
    """Median time and peak memory of both samplers on random numbers."""
    rng = np.random.default_rng(0)
    inputs = {
        "canvas_ids": np.zeros((rows, canvas), np.int32),
        "hidden": rng.standard_normal((rows, canvas, hidden), dtype=np.float32),
        "temperature": np.full(rows, 0.6, np.float32),
        "entropy_bound": np.full(rows, 0.1, np.float32),
        "uniform": rng.random((rows, canvas), dtype=np.float32),
        "noise_ids": np.zeros((rows, canvas), np.int32),
    }
    with tempfile.TemporaryDirectory() as folder:
        process = multiprocessing.get_context("spawn")
        _make(vocab, hidden, canvas, Path(folder))
        pipes: dict[str, Connection] = {}
        for kind in KINDS:
            pipes[kind], end = process.Pipe()
            process.Process(target=_serve, args=(kind, folder, inputs, threads, end), daemon=True).start()
            assert pipes[kind].recv() == "ready"
        times: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for turn in range(turns + 1):
            for kind in KINDS:
                pipes[kind].send(True)
                taken = pipes[kind].recv()
                if turn:  # the first is the warm-up
                    times[kind].append(taken)
        result: dict[str, Any] = {"vocab": vocab, "hidden": hidden, "canvas": canvas, "rows": rows, "threads": threads}
        for kind in KINDS:
            pipes[kind].send(False)
            median = round(statistics.median(times[kind]), 1)
            result[kind] = {"median_ms": median, "min_ms": round(min(times[kind]), 1), "peak_mb": pipes[kind].recv()}
    if as_json:
        click.echo(json.dumps(result))
        return
    table = Table(title=f"sampler, {vocab} tokens, hidden {hidden}, {rows} x {canvas} positions, {threads} threads")
    for name in ("", "median ms", "fastest ms", "peak MB"):
        table.add_column(name, justify="right")
    for kind in KINDS:
        table.add_row(kind, *(str(value) for value in result[kind].values()))
    Console().print(table)


def _make(vocab: int, hidden: int, canvas: int, folder: Path) -> None:
    import onnx_ir as ir

    from tests.build.cpu.sampler_model import streamed, traced

    table = np.random.default_rng(1).standard_normal((vocab, hidden), dtype=np.float32)
    for kind, make in (("traced", traced), ("streamed", streamed)):
        (folder / f"{kind}.onnx").write_bytes(ir.to_proto(make(table, folder, canvas)).SerializeToString())


if __name__ == "__main__":
    main()
