"""``dgcompile build``: from a checkpoint to a bundle."""

from __future__ import annotations

import time
from pathlib import Path

import click

from dgcompile.cli.command import FOLDER, Command, complete_recipe, complete_target, json_option
from dgcompile.cli.text import format_bytes, format_seconds, print_json


@click.command(
    "build",
    cls=Command,
    examples=[
        ("build examples/sudoku --target cpu -o bundles/sudoku", "A checkpoint folder, for the CPU"),
        ("build google/diffusiongemma-26B-A4B-it --target rtx5090 -o dg", "A hub checkpoint, for an RTX 5090"),
        ("build CHECKPOINT --target h100 -o BUNDLE --max-batch 8", "For an H100 that serves 8 requests at a time"),
        (
            "build CHECKPOINT --target cpu -o B --recipe fp8 --calibration FILE",
            "With FP8 activations, on own prompts",
        ),
        ("build --resume BUNDLE", "On the H100's machine: the engines of a bundle that was begun elsewhere"),
        (
            "build CHECKPOINT --target cpu -o BUNDLE --max-context 99 --overwrite",
            "Shorter requests, in place of an older bundle",
        ),
    ],
)
@click.argument("checkpoint", required=False)
@click.option("--target", shell_complete=complete_target, help="Target name or YAML file.")
@click.option("--recipe", shell_complete=complete_recipe, help="Recipe name or YAML file.  [default: the target's own]")
@click.option("-o", "--output", type=FOLDER, help="Folder of the bundle.")
@click.option(
    "--max-context",
    type=int,
    help="Most tokens, prompt and answer, of one request.  [default: the model's, up to 8192]",
)
@click.option("--max-batch", type=int, help="Most requests of one engine call, on a GPU.  [default: 1]")
@click.option(
    "--calibration",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Prompts for recipes with static scales, a JSON line each.  [default: CHECKPOINT/calibration.jsonl]",
)
@click.option("--overwrite", is_flag=True, help="Replace a bundle in that folder that was built from other inputs.")
@click.option(
    "--resume", type=FOLDER, metavar="BUNDLE", help="Build the engines of a bundle that was begun on another machine."
)
@json_option
def command(
    checkpoint: str | None,
    target: str | None,
    recipe: str | None,
    output: Path | None,
    max_context: int | None,
    max_batch: int | None,
    calibration: Path | None,
    overwrite: bool,
    resume: Path | None,
    as_json: bool,
) -> None:
    """Build a bundle from CHECKPOINT, a folder or a Hugging Face hub id.

    A build that was stopped goes on where it was when the same command is given again, and a finished one is only
    checked. `dgcompile targets` and `dgcompile recipes` list what there is to choose from.

    Engines for an RTX 5090 are built without one. Those for an H100 are built on its machine: everywhere else the build
    does what comes before, says what to do there, and ends with exit code 3.
    """
    from dgcompile import build as building
    from dgcompile.cli.render import progress
    from dgcompile.recipe import Recipe
    from dgcompile.target import Target

    started = time.monotonic()
    try:
        if resume is not None:
            given = (checkpoint, target, recipe, output, max_context, max_batch, calibration)
            if overwrite or any(value is not None for value in given):
                raise click.UsageError("--resume BUNDLE takes everything from the bundle: no other option goes with it")
            bundle = building.resume(resume, progress=progress())
        elif checkpoint is None or target is None or output is None:
            missing = "CHECKPOINT" if checkpoint is None else "--target" if target is None else "--output"
            raise click.UsageError(f"{missing} is missing")
        else:
            chosen = Target.load(target)
            bundle = building.build(
                checkpoint,
                chosen,
                Recipe.load(recipe or chosen.default_recipe),
                output,
                max_context=max_context,
                max_batch=max_batch,
                calibration=calibration,
                overwrite=overwrite,
                progress=progress(),
            )
    except KeyboardInterrupt:
        raise KeyboardInterrupt("run the same command again to go on where it stopped") from None
    seconds = time.monotonic() - started
    size = sum(record.size for record in bundle.manifest.files.values())
    if as_json:
        print_json(
            {
                "bundle": str(bundle.path),
                "target": bundle.target.name,
                "recipe": bundle.recipe.name,
                "max_context": bundle.max_context,
                "max_batch": bundle.max_batch,
                "bytes": size,
                "seconds": round(seconds, 3),
            }
        )
        return
    click.echo(
        f"{bundle.path}: {bundle.target.name}, {bundle.recipe.name}, max_context {bundle.max_context}, "
        f"{format_bytes(size)}, ready in {format_seconds(seconds)}"
    )
