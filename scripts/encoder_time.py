"""Times the encoder on long prompts, and what memory it takes: by length, by position, and by the size of the chunks.

    python scripts/encoder_time.py BUNDLE
    python scripts/encoder_time.py BUNDLE --tokens 8192 --chunk 128 --chunk 512 --chunk 2048 --json

Each combination runs in a process of its own, `--runs` times, the combinations taking turns; medians. The prompt is
random tokens. `over` is the memory that the encoder's calls needed at most, beside the cache and the weights, which are
mapped; Linux only. The figures are this machine's; nothing asserts them.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from dgcompile.bundle import Bundle
from dgcompile.runtime.loop import CPU_ENCODE_CHUNK, encode_prompts
from dgcompile.runtime.onnxruntime_session import OnnxRuntimeSession

WARM_UP_TOKENS = 16


def memory() -> dict[str, int]:
    """Resident bytes of this process: now, at most, and those of mapped files."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return {name: 1024 * int(fields[name].split()[0]) for name in ("VmRSS", "VmHWM", "RssFile")}


def encode(bundle: Path, tokens: int, chunk: int, threads: int) -> dict[str, Any]:
    """Encodes one prompt in this process, chunk by chunk."""
    opened = Bundle.open(bundle)
    # The graphs take any context; the limit is a line in the manifest.
    session = OnnxRuntimeSession(opened.path, opened.spec, tokens, threads)
    prompt = np.random.default_rng(0).integers(opened.spec.vocab_size, size=tokens).astype(np.int32)
    encode_prompts(session, session.new_batch(1, WARM_UP_TOKENS), [prompt[:WARM_UP_TOKENS]])
    batch = session.new_batch(1, tokens)
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    before = memory()
    seconds = []
    for start in range(0, tokens, chunk):
        part = prompt[None, start : start + chunk]
        started = time.perf_counter()
        session.encode(batch, part, np.array([part.shape[1]], dtype=np.int32))
        seconds.append(time.perf_counter() - started)
    after, cache = memory(), batch.cache.nbytes
    weights = after["RssFile"] - before["RssFile"]  # that no call had touched yet
    over = after["VmHWM"] - before["VmRSS"] - weights - cache
    return {"seconds": seconds, "cache": cache, "peak": after["VmHWM"], "over": over}


def in_process(bundle: Path, tokens: int, chunk: int, threads: int) -> dict[str, Any]:
    """:func:`encode` in a process of its own."""
    command = [sys.executable, __file__, str(bundle), "--worker", str(tokens), str(chunk), "--threads", str(threads)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def summary(tokens: int, chunk: int, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """One line of the table."""
    calls = [statistics.median(times) for times in zip(*(run["seconds"] for run in runs), strict=True)]
    widths = [min(chunk, tokens - start) for start in range(0, tokens, chunk)]
    per_token = [1e6 * seconds / width for seconds, width in zip(calls, widths, strict=True)]
    middle = [statistics.median(run[name] for run in runs) / 1e6 for name in ("cache", "over", "peak")]
    return {
        "tokens": tokens,
        "chunk": chunk,
        "seconds": round(sum(calls), 3),
        "us_per_token": round(1e6 * sum(calls) / tokens, 1),
        "first_call_us_per_token": round(per_token[0], 1),
        "last_call_us_per_token": round(per_token[-1], 1),
        **dict(zip(("cache_mb", "over_mb", "peak_rss_mb"), (round(value, 1) for value in middle), strict=True)),
        "us_per_token_by_call": [round(value, 1) for value in per_token],
    }


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.argument("bundle", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--tokens", multiple=True, type=click.IntRange(1), default=(512, 2048, 8192), help="Tokens of a prompt.")
@click.option(
    "--chunk", "chunks", multiple=True, type=click.IntRange(1), default=(CPU_ENCODE_CHUNK,), help="Of a call."
)
@click.option("--runs", default=3, type=click.IntRange(1), help="Processes of each combination.")
@click.option("--threads", default=1, help="Threads of the engine.")
@click.option("--worker", nargs=2, type=int, hidden=True, help="Encode in this process: tokens and chunk.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(
    bundle: Path,
    tokens: tuple[int, ...],
    chunks: tuple[int, ...],
    runs: int,
    threads: int,
    worker: tuple[int, int] | None,
    as_json: bool,
) -> None:
    """Median time and memory of encoding prompts with BUNDLE, a bundle of the cpu target."""
    if worker is not None:
        click.echo(json.dumps(encode(bundle, *worker, threads)))
        return
    combinations = [(count, chunk) for count in tokens for chunk in chunks]
    found: dict[tuple[int, int], list[dict[str, Any]]] = {combination: [] for combination in combinations}
    for _ in range(runs):
        for count, chunk in combinations:
            found[count, chunk].append(in_process(bundle, count, chunk, threads))
    results = [summary(*combination, results) for combination, results in found.items()]
    if as_json:
        click.echo(json.dumps({"bundle": str(bundle), "runs": runs, "threads": threads, "results": results}))
        return
    names = list(results[0])[:-1]
    table = Table(title=f"encoder, batch 1, {runs} runs, {threads} thread(s)")
    for name in names:
        table.add_column(name.replace("_", " "), justify="right")
    for result in results:
        table.add_row(*(str(result[name]) for name in names))
    Console().print(table)


if __name__ == "__main__":
    main()
