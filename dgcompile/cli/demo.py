"""``dgcompile demo``: builds the example checkpoint and lets it solve a few puzzles that it was not trained on."""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dgcompile.cli.command import FOLDER, Command, json_option
from dgcompile.cli.text import format_seconds, print_json
from dgcompile.errors import CheckpointError

if TYPE_CHECKING:
    from dgcompile.cli.sudoku import Puzzle, Solved
    from dgcompile.runtime.pipeline import Pipeline

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "sudoku"
"""The example of the source tree; a wheel does not carry it."""


@click.command(
    "demo",
    cls=Command,
    examples=[
        ("demo", "Build the example once, then solve six puzzles"),
        ("demo --puzzles 24 --seed 1", "More puzzles, other random numbers"),
        ("demo --checkpoint examples/sudoku --bundle bundles/sudoku", "With folders of your own choice"),
    ],
)
@click.option("--checkpoint", type=FOLDER, help="The example.  [default: examples/sudoku of the source tree]")
@click.option("--bundle", type=FOLDER, help="Where its bundle is kept.  [default: a folder in your cache]")
@click.option("--overwrite", is_flag=True, help="Replace a bundle in that folder that was built from other inputs.")
@click.option("--puzzles", type=click.IntRange(1), default=6, show_default=True, help="How many puzzles to solve.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the first puzzle.")
@json_option
def command(
    checkpoint: Path | None, bundle: Path | None, overwrite: bool, puzzles: int, seed: int, as_json: bool
) -> None:
    """Build the example checkpoint for the CPU and solve held-out 6x6 sudokus with it.

    The bundle is kept: a second demo starts at once.
    """
    source = checkpoint or EXAMPLE
    if checkpoint is None and not source.is_dir():
        raise CheckpointError(
            "the example checkpoint is not part of the installed package",
            fix="get the source tree of dgcompile and give --checkpoint examples/sudoku",
        )
    from dgcompile.build import build
    from dgcompile.checkpoint import Checkpoint
    from dgcompile.cli.render import console, progress
    from dgcompile.cli.sudoku import choose, pictures, read_puzzles
    from dgcompile.recipe import Recipe
    from dgcompile.runtime.pipeline import Pipeline
    from dgcompile.target import Target

    chosen = choose(read_puzzles(source / "prompts.jsonl"), puzzles)
    opened = Checkpoint.open(source)
    # The cache's name depends on the content: another example never meets an older one's bundle.
    folder = bundle or _cache_folder() / f"demo-{opened.fingerprint()[:16]}"
    click.echo(f"bundle: {folder}", err=True)
    try:
        # What lies in the cache is the demo's own: a bundle of an older version makes way.
        replace = overwrite or bundle is None
        build(opened, Target.load("cpu"), Recipe.load("fp32"), folder, overwrite=replace, progress=progress())
    except KeyboardInterrupt:
        raise KeyboardInterrupt("run the same command again to go on where it stopped") from None
    pipeline = Pipeline.open(folder)
    started = time.monotonic()
    solved = [_solve(pipeline, puzzle, seed + index) for index, puzzle in enumerate(chosen)]
    seconds = time.monotonic() - started

    right = sum(item.right for item in solved)
    if as_json:
        print_json(
            {
                "bundle": str(folder),
                "puzzles": [
                    {**asdict(item.puzzle), "got": item.got, "steps": item.steps, "right": item.right}
                    for item in solved
                ],
                "right": right,
                "seconds": round(seconds, 3),
            }
        )
        return
    console().print(pictures(solved))
    steps = sum(item.steps for item in solved)
    mean = steps / len(solved)
    click.echo(f"{right} of {len(solved)} right in {format_seconds(seconds)}, {mean:.1f} denoising steps per puzzle")


def _solve(pipeline: Pipeline, puzzle: Puzzle, seed: int) -> Solved:
    from dgcompile.cli.sudoku import Solved

    token_ids = pipeline.encode([{"role": "user", "content": puzzle.prompt}])
    result = pipeline.generate([token_ids], seeds=[seed])[0]
    return Solved(puzzle, pipeline.decode(result.token_ids), sum(result.steps_per_canvas))


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dgcompile"
