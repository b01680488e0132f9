"""Exact match on puzzles, through any way of running the model.

A *contender* is one way of running it: a function from prompt texts, a limit of denoising steps and one seed for each
prompt to the answer texts and the denoising steps each one took. `transformers_contender` is the reference; another
runtime is compared by writing the same function around it and passing both to `evaluate`.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer, DiffusionGemmaForBlockDiffusion

from dgcompile.runtime.pipeline import Pipeline

Contender = Callable[[Sequence[str], int, Sequence[int]], tuple[list[str], list[int]]]


@dataclass(frozen=True)
class Puzzle:
    """One line of prompts.jsonl."""

    prompt: str
    answer: str
    blanks: int


@dataclass(frozen=True)
class Score:
    """One cell of the table."""

    blanks: int
    max_steps: int
    puzzles: int
    exact_match: float  # percent
    mean_steps: float


def load_puzzles(path: Path, blanks: Sequence[int] | None = None, limit: int | None = None) -> list[Puzzle]:
    """The puzzles of a prompts file: only those with the given numbers of blanks, the first `limit` of each."""
    kept: dict[int, list[Puzzle]] = {}
    with path.open() as file:
        for line in file:
            puzzle = Puzzle(**json.loads(line))
            if blanks is None or puzzle.blanks in blanks:
                kept.setdefault(puzzle.blanks, []).append(puzzle)
    return [puzzle for group in kept.values() for puzzle in group[:limit]]


def generate_canvases(
    model: DiffusionGemmaForBlockDiffusion, prompts: torch.Tensor, max_denoising_steps: int
) -> tuple[torch.Tensor, list[int]]:
    """transformers' own generate() on prompts [B, 74]: canvases [B, 40] and the denoising steps of each row."""
    output = model.generate(prompts, max_denoising_steps=max_denoising_steps)
    canvases = output.sequences[:, prompts.shape[1] :]
    tokens = (canvases != model.generation_config.pad_token_id).sum(dim=-1)
    return canvases, (tokens / output.tokens_per_forward).round().int().tolist()


def expert_shares(model: DiffusionGemmaForBlockDiffusion, prompts: torch.Tensor) -> torch.Tensor:
    """How the routers spread tokens while generate() answers prompts [B, 74], encoder and decoder passes together.

    Returns [layers, experts]: the share of a layer's token-to-expert assignments, rows sum to 1.
    """
    config = model.config.text_config
    counts = torch.zeros(config.num_hidden_layers, config.num_experts)
    hooks = []
    for layers in (model.model.encoder.language_model.layers, model.model.decoder.layers):
        for row, layer in zip(counts, layers, strict=True):

            def count(
                _module: object, _inputs: object, output: tuple[torch.Tensor, ...], row: torch.Tensor = row
            ) -> None:
                row += torch.bincount(output[2].flatten(), minlength=len(row))

            hooks.append(layer.router.register_forward_hook(count))
    try:
        generate_canvases(model, prompts, model.generation_config.max_denoising_steps)
    finally:
        for hook in hooks:
            hook.remove()
    return counts / counts.sum(dim=1, keepdim=True)


def transformers_contender(folder: Path, batch: int = 64) -> Contender:
    """The checkpoint in `folder` as transformers runs it, in float32 on the CPU, `batch` puzzles at a time.

    All prompts have the same length, so a batch needs no padding. Rows of a batch share one stream of random
    numbers: it starts from the seed of the batch's first row.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = DiffusionGemmaForBlockDiffusion.from_pretrained(folder, dtype=torch.float32).eval()

    def run(prompts: Sequence[str], max_denoising_steps: int, seeds: Sequence[int]) -> tuple[list[str], list[int]]:
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        rows = torch.tensor([tokenizer.apply_chat_template(chat, return_dict=False) for chat in chats])
        answers, steps = [], []
        for start in range(0, len(rows), batch):
            torch.manual_seed(seeds[start])
            canvases, used = generate_canvases(model, rows[start : start + batch], max_denoising_steps)
            answers += tokenizer.batch_decode(canvases, skip_special_tokens=True)
            steps += used
        return answers, steps

    return run


def bundle_contender(bundle: Path, batch: int = 64, threads: int | None = None) -> Contender:
    """A bundle as dgcompile's runtime runs it, `batch` puzzles at a time; each row draws from its own seed."""
    pipeline = Pipeline.open(bundle, threads)

    def run(prompts: Sequence[str], max_denoising_steps: int, seeds: Sequence[int]) -> tuple[list[str], list[int]]:
        config = pipeline.bundle.generation.replace(max_denoising_steps=max_denoising_steps)
        rows = [pipeline.encode([{"role": "user", "content": prompt}]) for prompt in prompts]
        answers, steps = [], []
        for start in range(0, len(rows), batch):
            chosen = slice(start, start + batch)
            for result in pipeline.generate(rows[chosen], config, seeds[chosen]):
                answers.append(pipeline.decode(result.token_ids))
                steps.append(sum(result.steps_per_canvas))
        return answers, steps

    return run


def evaluate(contender: Contender, puzzles: Sequence[Puzzle], steps: Sequence[int], seed: int = 0) -> list[Score]:
    """Exact match of the whole grid for each number of blanks and each limit of steps."""
    scores = []
    for blanks in sorted({puzzle.blanks for puzzle in puzzles}):
        group = [puzzle for puzzle in puzzles if puzzle.blanks == blanks]
        for limit in steps:
            seeds = [seed + index for index in range(len(group))]
            answers, used = contender([puzzle.prompt for puzzle in group], limit, seeds)
            right = sum(answer == puzzle.answer for answer, puzzle in zip(answers, group, strict=True))
            scores.append(Score(blanks, limit, len(group), 100 * right / len(group), sum(used) / len(used)))
    return scores


def table(scores: Sequence[Score]) -> str:
    """Scores as a Markdown table, a row for each number of blanks; the last column belongs to the largest limit."""
    limits = sorted({score.max_steps for score in scores})
    lines = [
        "| blanks | " + " | ".join(f"{limit} step{'s' * (limit > 1)}" for limit in limits) + " | mean steps used |",
        "|" + "---|" * (len(limits) + 2),
    ]
    for blanks in sorted({score.blanks for score in scores}):
        row = {score.max_steps: score for score in scores if score.blanks == blanks}
        cells = [f"{row[limit].exact_match:.1f}" for limit in limits]
        lines.append(f"| {blanks} | " + " | ".join(cells) + f" | {row[limits[-1]].mean_steps:.1f} |")
    return "\n".join(lines)


def as_json(scores: Sequence[Score]) -> str:
    """Scores as a JSON list."""
    return json.dumps([asdict(score) for score in scores], indent=2)
