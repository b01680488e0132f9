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
        ("build google/diffusiongemma-26B-A4B-it --target cpu -o bundles/dg", "A checkpoint of the Hugging Face hub"),
        (
            "build CHECKPOINT --target cpu -o BUNDLE --max-context 99 --overwrite",
            "Shorter requests, in place of an older bundle",
        ),
    ],
)
@click.argument("checkpoint")
@click.option("--target", required=True, shell_complete=complete_target, help="Target name or YAML file.")
@click.option(
    "--recipe", default="fp32", show_default=True, shell_complete=complete_recipe, help="Recipe name or YAML file."
)
@click.option("-o", "--output", type=FOLDER, required=True, help="Folder of the bundle.")
@click.option(
    "--max-context",
    type=int,
    help="Most tokens, prompt and answer, of one request.  [default: the model's, up to 8192]",
)
@click.option("--overwrite", is_flag=True, help="Replace a bundle in that folder that was built from other inputs.")
@json_option
def command(
    checkpoint: str, target: str, recipe: str, output: Path, max_context: int | None, overwrite: bool, as_json: bool
) -> None:
    """Build a bundle from CHECKPOINT, a folder or a Hugging Face hub id.

    A build that was stopped goes on where it was when the same command is given again, and a finished one is only
    checked. `dgcompile targets` and `dgcompile recipes` list what there is to choose from.
    """
    from dgcompile.build import build
    from dgcompile.cli.render import progress
    from dgcompile.recipe import Recipe
    from dgcompile.target import Target

    started = time.monotonic()
    try:
        bundle = build(
            checkpoint,
            Target.load(target),
            Recipe.load(recipe),
            output,
            max_context=max_context,
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
                "bytes": size,
                "seconds": round(seconds, 3),
            }
        )
        return
    click.echo(
        f"{bundle.path}: {bundle.target.name}, {bundle.recipe.name}, max_context {bundle.max_context}, "
        f"{format_bytes(size)}, ready in {format_seconds(seconds)}"
    )
