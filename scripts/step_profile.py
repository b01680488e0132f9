"""Where a denoising step spends its time, by onnxruntime's profiler: by part of the graph and kind of node.

    python scripts/step_profile.py BUNDLE --past 512

Times of nodes add up to a little more than a step without the profiler. The figures are this machine's.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import click
import onnxruntime
from rich.console import Console
from rich.table import Table
from step_time import filled_batch

from dgcompile.bundle import Bundle
from dgcompile.runtime import onnxruntime_session
from dgcompile.runtime.onnxruntime_session import OnnxRuntimeSession

PARTS = {"sampler": "sampler", "block_attention": "attention", "mixture_of_experts": "experts"}
"""Parts by what the names of their nodes contain; the rest are dense products, norms, router and residuals."""


def part_of(name: str) -> str:
    """The part of the graph that a node belongs to, by its name."""
    return next((part for word, part in PARTS.items() if word in name), "rest")


def profile(session: OnnxRuntimeSession, past: int, runs: int) -> tuple[float, Counter[tuple[str, str]], float | None]:
    """Median milliseconds of a step, milliseconds by part and kind of node, and rows per choice in experts' tables."""
    spec = session.spec
    batch = filled_batch(session, past + spec.canvas_length, past)
    taken = []
    for _ in range(runs):
        start = time.perf_counter()
        session.denoise(batch, 0, 0)
        taken.append((time.perf_counter() - start) * 1e3)
    events: list[dict[str, Any]] = json.loads(Path(session._denoiser.end_profiling()).read_text())
    by_kind: Counter[tuple[str, str]] = Counter()
    rows = 0
    for event in events:
        if event.get("cat") != "Node" or not event["name"].endswith("kernel_time"):
            continue
        kind, part = event["args"]["op_name"], part_of(event["name"])
        if kind == "Scan":
            continue  # its nodes are counted themselves
        by_kind[part, kind] += event["dur"] / 1e3 / runs
        if part == "experts" and kind == "FusedMatMul":
            shape = next(iter(event["args"]["output_type_shape"][0].values()))
            rows += shape[0] * shape[1]
    choices = spec.canvas_length * spec.top_k_experts * spec.num_hidden_layers
    return statistics.median(taken), by_kind, rows / 2 / runs / choices if rows else None


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.argument("bundle", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--past", default=512, help="Tokens in the cache.")
@click.option("--runs", default=9, help="Steps.")
@click.option("--threads", default=2, help="Threads of the engine.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(bundle: Path, past: int, runs: int, threads: int, as_json: bool) -> None:
    """Profile of a denoising step of BUNDLE, a bundle of the cpu target."""
    opened = Bundle.open(bundle)
    plain = onnxruntime_session.session_options
    with tempfile.TemporaryDirectory() as folder:

        def profiled(place: Path, count: int | None = None) -> onnxruntime.SessionOptions:
            options = plain(place, count)
            options.enable_profiling = True
            options.profile_file_prefix = f"{folder}/profile"
            return options

        onnxruntime_session.session_options = profiled
        session = OnnxRuntimeSession(opened.path, opened.spec, past + opened.spec.canvas_length, threads)
        step, by_kind, fill = profile(session, past, runs)
        del session
    parts: Counter[str] = Counter()
    for (part, _), taken in by_kind.items():
        parts[part] += taken
    if as_json:
        kinds = [[part, kind, round(taken, 2)] for (part, kind), taken in by_kind.most_common()]
        result = {"step_ms": step, "parts_ms": dict(parts), "kinds_ms": kinds, "rows_per_choice": fill}
        click.echo(json.dumps(result | {"past": past, "threads": threads, "runs": runs}))
        return
    table = Table(title=f"a step of {step:.0f} ms, past {past}, {threads} threads, {runs} runs")
    for name in ("part", "ms", "kinds of node, ms"):
        table.add_column(name)
    for part, taken in parts.most_common():
        kinds_of = [f"{kind} {ms:.1f}" for (where, kind), ms in by_kind.most_common() if where == part and ms >= 0.5]
        table.add_row(part, f"{taken:.0f}", ", ".join(kinds_of))
    Console(width=120).print(table)
    if fill is not None:
        click.echo(f"rows in the experts' tables for each choice of an expert: {fill:.2f}")


if __name__ == "__main__":
    main()
