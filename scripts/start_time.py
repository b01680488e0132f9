"""Times starting: importing the command line, its help, and a bundle from nothing to the end of its first step.

    python scripts/start_time.py BUNDLE
    python scripts/start_time.py BUNDLE --runs 9 --json

Each run is a process of its own, and the kinds take turns. Files are in the page cache from the second run on, and the
first, which warms it up, is not counted. What was read is what Linux counts for the process (`rchar` of /proc/self/io);
files that are mapped count as resident where they were touched. The figures are this machine's; nothing asserts them.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

IMPORT = """
import time
started = time.perf_counter()
import dgcompile.cli.app
print(time.perf_counter() - started)
"""

HELP = "from dgcompile.cli import main; main()"

OPEN = """
import json, sys, time

def accounts():
    io = dict(line.split(": ") for line in open("/proc/self/io").read().splitlines())
    status = dict(line.split(":") for line in open("/proc/self/status").read().splitlines())
    kilobytes = {name: int(status[name].split()[0]) for name in ("RssAnon", "RssFile")}
    return int(io["rchar"]) / 1e6, kilobytes["RssAnon"] / 1e3, kilobytes["RssFile"] / 1e3

times = [time.perf_counter()]
from dgcompile.runtime.pipeline import Pipeline
import dgcompile.runtime.onnxruntime_session
times.append(time.perf_counter())
before = accounts()
pipeline = Pipeline.open(sys.argv[1])
times.append(time.perf_counter())
after = accounts()
prompt = pipeline.encode("1") if pipeline.tokenizer else [1]
config = pipeline.bundle.generation.replace(max_new_tokens=1, max_denoising_steps=1)
pipeline.generate([prompt], config, on_step=lambda event: times.append(time.perf_counter()))
seconds = [end - begin for begin, end in zip(times, times[1:])]
grown = [now - then for now, then in zip(after, before)]
print(json.dumps(dict(zip(("import_s", "open_s", "first_step_s", "read_mb", "own_mb", "mapped_mb"), seconds + grown))))
"""


def timed(*arguments: str) -> tuple[float, str]:
    """Seconds of a process from its start to its end, and what it printed."""
    started = time.perf_counter()
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True)
    return time.perf_counter() - started, done.stdout


def run_once(bundle: Path) -> dict[str, float]:
    """One run of each kind, in seconds and megabytes."""
    imported = float(timed("-c", IMPORT)[1])
    helped = timed("-c", HELP, "--help")[0]
    whole, said = timed("-c", OPEN, str(bundle))
    found: dict[str, float] = json.loads(said)
    opened = {f"bundle: {name}": value for name, value in found.items()}
    return {"import dgcompile.cli.app": imported, "dgcompile --help": helped, **opened, "bundle: whole process": whole}


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.argument("bundle", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--runs", default=7, type=click.IntRange(2), help="Counted runs of each kind.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(bundle: Path, runs: int, as_json: bool) -> None:
    """Median and extremes of starting with BUNDLE, a bundle of the cpu target."""
    run_once(bundle)
    found = [run_once(bundle) for _ in range(runs)]
    results = {}
    for name in found[0]:
        values = [run[name] for run in found]
        results[name] = {
            "median": round(statistics.median(values), 3),
            "min": round(min(values), 3),
            "max": round(max(values), 3),
        }
    if as_json:
        click.echo(json.dumps({"bundle": str(bundle), "runs": runs, "results": results}))
        return
    table = Table("", "median", "min", "max", title=f"starting, {runs} runs: seconds, or MB")
    for name, row in results.items():
        table.add_row(name, *(f"{value:.3f}" for value in row.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
