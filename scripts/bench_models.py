"""Writes models to measure with ``dgcompile bench``, and their bundles for the CPU: speed needs no trained weights.

    python scripts/bench_models.py FOLDER                                    # all three sizes
    python scripts/bench_models.py FOLDER --size hidden512 --recipe fp32     # one bundle of one of them

What exists and is complete is kept; what a killed run left behind is finished.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

# The model's shape belongs to the tests, which are not installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from synthetic_checkpoint import EXAMPLE, write_checkpoint

from dgcompile.build import build
from dgcompile.checkpoint import CONFIG_FILE, Checkpoint
from dgcompile.cli.render import progress
from dgcompile.cli.text import format_bytes
from dgcompile.config_file import read_json
from dgcompile.errors import CheckpointError, DgcompileError
from dgcompile.model_spec import ModelSpec
from dgcompile.plan.weights import parameters_of
from dgcompile.recipe import Recipe
from dgcompile.target import Target
from dgcompile.weights_store import lay_out_store
from tests.model_config import published_config, published_form

CHECKPOINT_BYTES = 2
"""Of a parameter: checkpoints are written in bfloat16."""


@dataclass(frozen=True)
class Size:
    """A model to measure.

    Attributes:
        name: as ``--size`` takes it.
        title: what it is.
        config: config.json of the model.
        trained: the checkpoint that exists already; None for random weights.
        options: of ``dgcompile bench`` that suit it.
    """

    name: str
    title: str
    config: Mapping[str, Any]
    trained: Path | None = None
    options: str = ""

    @property
    def spec(self) -> ModelSpec:
        """Shape of the model."""
        return ModelSpec.from_config(self.config)

    def checkpoint(self, folder: Path) -> Path:
        """Where its checkpoint is, or will be."""
        return self.trained or folder / self.name / "checkpoint"


SIZES = (
    Size(
        "example",
        "the trained example, 1.3 million parameters",
        read_json(EXAMPLE / CONFIG_FILE),
        EXAMPLE,
        # What a puzzle takes.
        "--prompt-tokens 60 --new-tokens 40",
    ),
    Size(
        "hidden512",
        "hidden 512, 6 layers, 32 experts top-4, vocabulary 32768, canvas 256; random",
        published_form(
            layer_types=["full_attention" if kind == "f" else "sliding_attention" for kind in "sssfsf"],
            num_hidden_layers=6,
            hidden_size=512,
            intermediate_size=384,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=64,
            num_global_key_value_heads=1,
            global_head_dim=128,
            num_experts=32,
            top_k_experts=4,
            moe_intermediate_size=128,
            vocab_size=32768,
            sliding_window=1024,
            max_position_embeddings=8192,
            canvas_length=256,
            dtype="bfloat16",
        ),
    ),
    Size(
        "wide",
        "two layers of the published widths, a sliding and a full one; random",
        published_config(2),
        # A step takes seconds on a desktop.
        options="--new-tokens 256 --steps 4 --turns 3",
    ),
)


def make(size: Size, recipes: list[Recipe], folder: Path) -> dict[str, Path]:
    """Writes the checkpoint and the bundles of a size, but for what is there.

    Returns:
        The bundles, by recipe.

    Raises:
        DgcompileError: something else lies in their place.
        OSError: the disk is too small.
    """
    checkpoint = size.checkpoint(folder)
    if not _is_checkpoint(checkpoint, size):
        write_checkpoint(checkpoint, size.config, progress=progress())
    bundles = {recipe.name: folder / size.name / recipe.name for recipe in recipes}
    for recipe in recipes:
        # Keeps what is complete, goes on with what a killed build left, and redoes what older code made.
        build(checkpoint, Target.load("cpu"), recipe, bundles[recipe.name], progress=progress())
    return bundles


def _is_checkpoint(folder: Path, size: Size) -> bool:
    try:
        return Checkpoint.open(folder).spec == size.spec
    except CheckpointError:
        return False


def bytes_of_size(size: Size, recipes: list[Recipe]) -> dict[str, int]:
    """Bytes of the weights that a size takes on the disk, by what they belong to."""
    spec, cpu = size.spec, Target.load("cpu")
    found = {} if size.trained else {"checkpoint": CHECKPOINT_BYTES * sum(parameters_of(spec).values())}
    return found | {recipe.name: lay_out_store(spec, recipe.for_target(cpu)).nbytes for recipe in recipes}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--size",
    "names",
    multiple=True,
    type=click.Choice([size.name for size in SIZES]),
    help="Which model; may be repeated.  [default: all]",
)
@click.option(
    "--recipe",
    "recipe_names",
    multiple=True,
    default=("fp32", "int4"),
    show_default=True,
    help="Recipe of a bundle; may be repeated.",
)
def main(folder: Path, names: tuple[str, ...], recipe_names: tuple[str, ...]) -> None:
    """Write the models that `dgcompile bench` measures into FOLDER, and say how to measure them."""
    sizes = [size for size in SIZES if not names or size.name in names]
    try:
        recipes = [Recipe.load(name) for name in recipe_names]
        needed = {size.name: bytes_of_size(size, recipes) for size in sizes}
        for size in sizes:
            click.echo(f"{size.name}: {size.title}")
            parts = ", ".join(f"{part} {format_bytes(nbytes)}" for part, nbytes in needed[size.name].items())
            click.echo(f"    {parts}")
        folder.mkdir(parents=True, exist_ok=True)
        click.echo(f"{format_bytes(shutil.disk_usage(folder).free)} of disk are free\n")
        for size in sizes:
            bundles = make(size, recipes, folder)
            words = ["dgcompile", "bench", *map(str, bundles.values())]
            words += ["--against", "transformers", "--checkpoint", str(size.checkpoint(folder)), *size.options.split()]
            click.echo(f"# {size.name}\n{shlex.join(words)}")
    except (DgcompileError, OSError) as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()
