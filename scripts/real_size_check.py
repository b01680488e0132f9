"""Runs the whole pipeline at the size of DiffusionGemma 26B-A4B on this machine, without the published weights.

    python scripts/real_size_check.py --output FILE.json

Six checks, each against bounds; takes hours on two cores, up to 60 GB of disk, and 24 GB of memory for `generate`:

    plan      the published config's parameters and memory by `dgcompile plan`
    trace     both graphs of all 30 layers: time, memory, operators, constants
    quantize  random weights of 2 and 6 layers to int4: time beside reading and writing, memory
    build     30 layers of empty weights to a whole bundle: time, memory and bytes of each stage, disk beside plan
    resume    the same build, killed and resumed: equal files
    generate  2 layers of random weights in float32: the same tokens as transformers
"""

from __future__ import annotations

import sys
from datetime import date
from pathlib import Path

import click

# Packages of the scripts lie beside this file; the model's shape belongs to the tests, which are not installed.
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from measure import machine
from real_size.checks import CHECKS, CheckFailed, Workplace, remove
from real_size.results import Results, Row

from dgcompile.errors import DgcompileError

FAILED = 1


@click.command(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    help="\b\n" + (__doc__ or "").replace("\n\n", "\n\n\b\n"),
)
@click.option(
    "--only", type=click.Choice(list(CHECKS)), multiple=True, help="Run this check; may be given again.  [default: all]"
)
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="JSON file with all figures, written after each check.",
)
@click.option(
    "--work",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("bundles/real-size"),
    show_default=True,
    help="Folder for checkpoints and bundles.",
)
@click.option("--keep", is_flag=True, help="Leave checkpoints and bundles there; checkpoints are used again.")
@click.option("--small", is_flag=True, help="A stand-in of two narrow layers, to try this script itself.")
@click.option("--target", default="rtx5090", show_default=True, help="Target of graphs and bundles.")
@click.option("--quiet", is_flag=True, help="Do not pass on what the measured commands say.")
def main(
    only: tuple[str, ...], output: Path | None, work: Path, keep: bool, small: bool, target: str, quiet: bool
) -> None:
    chosen = [name for name in CHECKS if not only or name in only]
    results = Results({"date": date.today().isoformat(), "machine": machine(), "small": small}, output)
    place = Workplace(work, small, target, keep=keep, echo=not quiet, figures=results.figures)
    work.mkdir(parents=True, exist_ok=True)
    before = set(work.iterdir())
    try:
        for name in chosen:
            click.echo(f"== {name}", err=True)
            rows = results.rows[name] = []
            try:
                for row in CHECKS[name](place):
                    rows.append(row)
            except (CheckFailed, DgcompileError, OSError) as error:
                rows.append(Row("could not be carried out", f"{error}", "", False))
            results.write()
    finally:
        if not keep:
            for folder in set(work.iterdir()) - before:
                remove(folder)
    results.print()
    if results.failures:
        click.echo(f"{results.failures} bounds do not hold")
        sys.exit(FAILED)


if __name__ == "__main__":
    main()
