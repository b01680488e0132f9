"""Measure the example: exact match in percent on held-out puzzles, through transformers' generate() or a bundle."""

from pathlib import Path

import click
import torch
from example.evaluation import as_json, bundle_contender, evaluate, load_puzzles, table, transformers_contender

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "sudoku"


@click.command(help=__doc__)
@click.argument("checkpoint", type=click.Path(exists=True, file_okay=False, path_type=Path), default=EXAMPLE)
@click.option("--bundle", type=click.Path(exists=True, file_okay=False, path_type=Path), help="run this bundle instead")
@click.option("--prompts", type=click.Path(exists=True, path_type=Path), help="default: CHECKPOINT/prompts.jsonl")
@click.option("--puzzles", type=int, help="only the first N puzzles of each number of blanks")
@click.option("--blanks", type=int, multiple=True, help="only puzzles with so many blanks (repeatable)")
@click.option("--steps", type=int, multiple=True, default=(1, 2, 4, 8, 16), show_default=True, help="repeatable")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--threads", type=int, default=1, show_default=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="write the scores there as well")
def main(
    checkpoint: Path,
    bundle: Path | None,
    prompts: Path | None,
    puzzles: int | None,
    blanks: tuple[int, ...],
    steps: tuple[int, ...],
    seed: int,
    threads: int,
    json_path: Path | None,
) -> None:
    torch.set_num_threads(threads)
    chosen = load_puzzles(prompts or checkpoint / "prompts.jsonl", blanks or None, puzzles)
    if not chosen:
        raise click.ClickException("no puzzle matches --blanks")
    contender = bundle_contender(bundle, threads=threads) if bundle else transformers_contender(checkpoint)
    scores = evaluate(contender, chosen, steps, seed)
    click.echo(table(scores))
    if json_path:
        json_path.write_text(as_json(scores) + "\n")


if __name__ == "__main__":
    main()
