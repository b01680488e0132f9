"""Writes a small random DiffusionGemma checkpoint of any shape, with the published layout, for trying things out.

The whole model is in memory meanwhile. Checkpoints of the published widths are made by synthetic_checkpoint.py.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
import torch

# The generator belongs to the tests, which are not installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.models import random_checkpoint, write_tokenizer

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_F = TypeVar("_F", bound=Callable[..., Any])
LAYER_NAMES = {"s": "sliding", "f": "full"}


def _layers(context: click.Context, parameter: click.Parameter, value: str) -> list[str]:
    if set(value) - set(LAYER_NAMES) or not value.endswith("f"):
        raise click.BadParameter(f"{value!r} must be letters s (sliding) and f (full) and end with f")
    return [LAYER_NAMES[letter] for letter in value]


def _count(name: str, default: int, text: str, minimum: int = 1) -> Callable[[_F], _F]:
    """A whole-number option."""
    return click.option(name, type=click.IntRange(min=minimum), default=default, show_default=True, help=text)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--layers", default="sff", show_default=True, callback=_layers, help="Layer kinds: s sliding, f full.")
@_count("--hidden", 32, "Hidden size.")
@_count("--intermediate", 24, "Width of the dense MLP.")
@_count("--heads", 4, "Attention heads.")
@_count("--kv-heads", 2, "KV heads of sliding layers.")
@_count("--head-dim", 8, "Head size of sliding layers.", minimum=2)
@_count("--full-kv-heads", 1, "KV heads of full layers.")
@_count("--full-head-dim", 16, "Head size of full layers.", minimum=2)
@_count("--experts", 6, "Experts per layer.")
@_count("--top-k", 2, "Experts per token.")
@_count("--moe-intermediate", 16, "Width of one expert.")
@_count("--vocab", 288, "Vocabulary size.", minimum=16)
@_count("--canvas", 16, "Canvas length.")
@_count("--window", 24, "Sliding window.")
@click.option("--sharpness", type=float, default=5.0, show_default=True, help="Scale of the logits; lower is flatter.")
@click.option("--seed", type=int, default=0, show_default=True, help="Equal options and seed give equal files.")
@_count("--shards", 1, "Number of safetensors files.")
@click.option("--dtype", type=click.Choice(["bfloat16", "float16", "float32"]), default="bfloat16", show_default=True)
@click.option(
    "--config-form",
    type=click.Choice(["published", "transformers"]),
    default="published",
    show_default=True,
    help="Form of config.json: as published, or as transformers saves it.",
)
@click.option(
    "--tokenizer",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder to take the tokenizer and chat template from, for example examples/sudoku (which needs --vocab 64). "
    "Default: every byte is a token.",
)
def main(folder: Path, dtype: str, tokenizer: Path | None, vocab: int, **options: object) -> None:
    """Writes a random checkpoint into FOLDER, which must be empty or missing."""
    if folder.exists() and any(folder.iterdir()):
        raise click.UsageError(f"{folder} is not empty; give another folder or remove it first")
    if tokenizer is not None:
        _check_tokenizer(tokenizer, vocab)
    random_checkpoint(folder, dtype=getattr(torch, dtype), vocab=vocab, with_tokenizer=False, **options)  # type: ignore[arg-type]
    if tokenizer is None:
        write_tokenizer(folder, vocab)
    else:
        for name in TOKENIZER_FILES:
            if (tokenizer / name).exists():
                shutil.copyfile(tokenizer / name, folder / name)
    click.echo(f"{folder}: {sum(file.stat().st_size for file in folder.iterdir()) / 1e6:.1f} MB")


def _check_tokenizer(folder: Path, vocab: int) -> None:
    """Refuses a tokenizer that could produce ids outside the vocabulary."""
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    if not file.exists():
        raise click.UsageError(f"{file} does not exist; --tokenizer names a folder with a tokenizer.json")
    size = Tokenizer.from_file(str(file)).get_vocab_size()
    if size > vocab:
        raise click.UsageError(f"{file} has {size} tokens but --vocab is {vocab}; give --vocab {size} or more")


if __name__ == "__main__":
    main()
