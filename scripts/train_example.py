"""Train the 6x6 sudoku example checkpoint from nothing: puzzles, tokenizer, chat template, weights and prompt files.

Takes about ten minutes on one CPU core; a second core hardly helps so small a model. The files go to OUTPUT in
the layout of the published checkpoint.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: spinning threads crawl beside another process

import time
from pathlib import Path

import click
import numpy as np
import torch
from example import prompts, sudoku
from example.checkpoint import save_checkpoint
from example.evaluation import generate_canvases
from example.training import Settings, train
from transformers import DiffusionGemmaForBlockDiffusion
from transformers import logging as transformers_logging

DEFAULT_OUTPUT = Path(__file__).resolve().parent.parent / "examples" / "sudoku"
DEV_BLANKS, DEV_PUZZLES = (10, 14), 64


@click.command(help=__doc__)
@click.argument("output", type=click.Path(file_okay=False, path_type=Path), default=DEFAULT_OUTPUT)
@click.option("--steps", type=int, default=Settings.steps, show_default=True)
@click.option("--seed", type=int, default=Settings.seed, show_default=True)
@click.option("--threads", type=int, default=1, show_default=True)
@click.option("--learning-rate", type=float, default=Settings.learning_rate, show_default=True)
@click.option("--qk-start", type=float, default=Settings.qk_start, show_default=True)
@click.option("--snapshots", type=click.Path(file_okay=False, path_type=Path), help="folder for unfinished checkpoints")
@click.option("--snapshot-every", type=int, default=300, show_default=True, help="steps between dev measurements")
def main(
    output: Path,
    steps: int,
    seed: int,
    threads: int,
    learning_rate: float,
    qk_start: float,
    snapshots: Path | None,
    snapshot_every: int,
) -> None:
    torch.set_num_threads(threads)
    transformers_logging.set_verbosity_error()
    split = sudoku.split_orbits(seed)
    rng = np.random.default_rng([seed, 3])
    dev_puzzles, dev_solutions = prompts.held_out(rng, split.dev, DEV_BLANKS, DEV_PUZZLES)
    dev_rows = prompts.prompt_tokens(dev_puzzles).split(DEV_PUZZLES)
    dev_targets = prompts.canvas_tokens(dev_solutions).split(DEV_PUZZLES)

    def report(line: str) -> None:
        click.echo(f"{time.strftime('%H:%M:%S')} {line}")

    def snapshot(step: int, model: DiffusionGemmaForBlockDiffusion) -> str:
        if snapshots:
            save_checkpoint(model, snapshots)
        parts = []
        for blanks, rows, targets in zip(DEV_BLANKS, dev_rows, dev_targets, strict=True):
            for limit in (1, 16):
                with torch.random.fork_rng():
                    torch.manual_seed(step)
                    canvases, _ = generate_canvases(model, rows, limit)
                exact = (canvases == targets).all(dim=-1).float().mean().item()
                parts.append(f"{blanks} blanks {limit} steps {100 * exact:.0f} %")
        return f"dev at step {step}: " + ", ".join(parts)

    prompts.write_prompts(output, seed)
    if snapshots:
        prompts.write_prompts(snapshots, seed)
    settings = Settings(steps=steps, seed=seed, learning_rate=learning_rate, qk_start=qk_start)
    model = train(settings, split.train, report, snapshot, snapshot_every)
    save_checkpoint(model, output)
    report(f"saved {output}")


if __name__ == "__main__":
    main()
