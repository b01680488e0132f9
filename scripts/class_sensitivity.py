"""What each class of weight costs in each number format: KL of the first step's logits, all other weights untouched.

\b
    dgcompile build examples/sudoku --target cpu -o bundles/sudoku
    python scripts/class_sensitivity.py bundles/sudoku examples/sudoku/prompts.jsonl

BUNDLE is one of recipe fp32. Its weights are rounded in a copy, class by class, to what the format would store; its
graphs stay as they are, so activations are not rounded.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import click
import numpy as np
import torch

from dgcompile.bundle import WEIGHTS_FILE, Bundle
from dgcompile.errors import DgcompileError
from dgcompile.evaluate import GraphSession, first_step_logits, open_graphs, read_examples
from dgcompile.evaluate.metrics import kl_divergence
from dgcompile.quantize.formats import FORMATS, WeightFormat
from dgcompile.recipe import WeightClass, weight_class
from dgcompile.runtime.pipeline import Pipeline
from dgcompile.safetensors_file import read_header

CASES: list[tuple[WeightClass, WeightFormat, int]] = [
    (name, number_format, group)
    for name in ("experts", "attention", "dense_mlp")
    for number_format, group in (("fp8", 0), ("int8", 0), ("int4", 32), ("int4", 64))
]


def rounded(bundle: Bundle, folder: Path, name: WeightClass, number_format: WeightFormat, group: int) -> Bundle:
    """A copy of a float32 bundle in which one class of weight has only values that the format can store."""
    copy = Path(shutil.copytree(bundle.path, folder))
    data = bytearray((copy / WEIGHTS_FILE).read_bytes())
    known = FORMATS[number_format]
    for tensor_name, tensor in read_header(copy / WEIGHTS_FILE).items():
        if weight_class(tensor_name) == name:
            where = slice(tensor.offset, tensor.offset + tensor.nbytes)
            weight = torch.frombuffer(data[where], dtype=torch.float32).view(tensor.shape)
            values = known.decode(known.encode(weight, group, "F32"), group)
            data[where] = values.contiguous().numpy().tobytes()
    (copy / WEIGHTS_FILE).write_bytes(data)
    return replace(bundle, path=copy)


@click.command(help=__doc__)
@click.argument("bundle", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("prompts", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--limit", type=int, default=256, show_default=True, help="prompts, from all over the file")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="write the rows there as well")
def main(bundle: Path, prompts: Path, limit: int, json_path: Path | None) -> None:
    torch.set_num_threads(1)
    try:
        opened = open_graphs(bundle)
        if opened.recipe.name != "fp32":
            raise click.ClickException(f"{bundle} is of recipe {opened.recipe.name}: give one of recipe fp32")
        pipeline = Pipeline.open(bundle, 1)
        examples = read_examples(prompts, limit)
        ids = [pipeline.encode([{"role": "user", "content": example.prompt}]) for example in examples]
    except DgcompileError as error:
        raise click.ClickException(str(error)) from error

    def logits(source: Bundle) -> np.ndarray:
        session = GraphSession(source, 1)
        return np.stack([first_step_logits(session, prompt, seed) for seed, prompt in enumerate(ids)])

    expected, rows = logits(opened), []
    click.echo("| class | format | KL, mean | KL, worst prompt | relative error |\n|---|---|---|---|---|")
    for name, number_format, group in CASES:
        with tempfile.TemporaryDirectory() as place:
            found = logits(rounded(opened, Path(place) / "bundle", name, number_format, group))
        kl = np.stack([kl_divergence(*pair) for pair in zip(expected, found, strict=True)])
        relative = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
        text = f"{number_format} g{group}" if group else number_format
        row = {"class": name, "format": text, "kl": float(kl.mean()), "worst": float(kl.mean(-1).max())}
        rows.append({**row, "relative_error": relative})
        click.echo(f"| {name} | {text} | {row['kl']:.1e} | {row['worst']:.1e} | {relative:.1e} |")
    if json_path:
        json_path.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
