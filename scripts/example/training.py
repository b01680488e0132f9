"""The training loop: puzzles in, a trained transformers model out."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F
from transformers import DiffusionGemmaForBlockDiffusion

from example import prompts, sudoku
from example import tokenizer as tok
from example.checkpoint import CANVAS_LENGTH, build_model
from example.network import KeysValues, TrainingNetwork


@dataclass(frozen=True)
class Settings:
    """What decides the trained weights (with the machine's arithmetic).

    More steps make a better model and a worse example: one denoising step would then solve most puzzles by itself, and
    nobody could see the denoising loop at work.
    """

    steps: int = 800
    seed: int = 0
    puzzles: int = 32  # prompts a step
    copies: int = 2  # noised canvases for each prompt
    learning_rate: float = 2e-3
    last_learning_rate: float = 2e-5
    warm_up: int = 60
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.98)
    clip: float = 1.0
    balance: float = 0.01
    all_noise: float = 1 / 8  # share of canvases at the noise level that generation starts from
    qk_start: float = 1.4


def learning_rate(settings: Settings, step: int) -> float:
    """Linear warm-up, then one cosine over the whole run."""
    if step < settings.warm_up:
        return settings.learning_rate * (step + 1) / settings.warm_up
    progress = (step - settings.warm_up) / max(1, settings.steps - settings.warm_up)
    low, high = settings.last_learning_rate, settings.learning_rate
    return low + (high - low) * (1 + math.cos(math.pi * progress)) / 2


def batches(settings: Settings, orbits: np.ndarray) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless (prompts [B, 74], canvases [B, 40]); puzzles are made many steps at a time because the maker is
    vectorised and takes far less time a puzzle that way."""
    rng = np.random.default_rng([settings.seed, 0])
    ahead = 64
    while True:
        blanks = rng.integers(prompts.FEWEST_BLANKS, prompts.MOST_BLANKS + 1, ahead * settings.puzzles)
        puzzles, solutions = sudoku.make_puzzles(rng, orbits, blanks)
        prompt_rows = prompts.prompt_tokens(puzzles).split(settings.puzzles)
        yield from zip(prompt_rows, prompts.canvas_tokens(solutions).split(settings.puzzles), strict=True)


def noise_levels(rows: int, all_noise: float, generator: torch.Generator) -> torch.Tensor:
    """Noise level of each canvas [rows]: some at 1, the rest spread evenly over (0, 1) and shuffled."""
    fixed = round(rows * all_noise)
    spread = (torch.arange(rows - fixed) + torch.rand(rows - fixed, generator=generator)) / (rows - fixed)
    return torch.cat([torch.ones(fixed), spread])[torch.randperm(rows, generator=generator)]


def repeat_cache(cache: list[KeysValues], copies: int) -> list[KeysValues]:
    """The cache of B prompts for R = copies * B canvases, copy after copy."""
    return [(keys.repeat(copies, 1, 1, 1), values.repeat(copies, 1, 1, 1)) for keys, values in cache]


def step_loss(
    network: TrainingNetwork,
    prompt_rows: torch.Tensor,
    clean: torch.Tensor,
    settings: Settings,
    generator: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cross entropy, balance loss) of one step on prompts [B, 74] and clean canvases [B, 40].

    A canvas token is replaced by a uniformly drawn one with the canvas's noise level as probability. The first copy
    of each canvas gets feedback, as every step of generation but the first does: a pass without gradients, its
    logits at a temperature from the range that generation sweeps.
    """
    count, rows = len(clean), len(clean) * settings.copies
    target = clean.repeat(settings.copies, 1)
    levels = noise_levels(rows, settings.all_noise, generator)
    drawn = torch.randint(tok.VOCAB_SIZE, target.shape, generator=generator)
    noisy = torch.where(torch.rand(target.shape, generator=generator) < levels[:, None], drawn, target)

    network.routing.clear()
    cache = network.encode(prompt_rows)
    previous = torch.zeros(rows, CANVAS_LENGTH, tok.VOCAB_SIZE)
    with torch.no_grad():
        temperature = 0.4 + 0.4 * torch.rand(count, 1, 1, generator=generator)
        previous[:count] = (network.decode(noisy[:count], cache, None) / temperature).softmax(dim=-1)
    logits = network.decode(noisy, repeat_cache(cache, settings.copies), previous)
    return F.cross_entropy(logits.flatten(0, 1), target.flatten()), network.balance_loss()


def parameter_groups(network: TrainingNetwork, weight_decay: float) -> list[dict[str, object]]:
    """Matrices with weight decay; norms, scales and the embedding without (decay would only pull the norms to 0)."""
    matrices, others = [], []
    for name, parameter in network.named_parameters():
        decays = parameter.dim() >= 2 and "embed" not in name and name != "scalars"
        (matrices if decays else others).append(parameter)
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def train(
    settings: Settings,
    orbits: np.ndarray,
    report: Callable[[str], None],
    snapshot: Callable[[int, DiffusionGemmaForBlockDiffusion], str | None],
    snapshot_every: int,
) -> DiffusionGemmaForBlockDiffusion:
    """Train a new model on puzzles of `orbits`.

    `report` takes progress lines. `snapshot(step, model)` is called every `snapshot_every` steps, on a model whose
    layer scalars are up to date; what it returns is reported.
    """
    model = build_model(settings.seed, settings.qk_start)
    network = TrainingNetwork(model)
    optimizer = torch.optim.AdamW(parameter_groups(network, settings.weight_decay), betas=settings.betas, foreach=True)
    generator = torch.Generator().manual_seed(settings.seed)
    start, window, seen = time.monotonic(), np.zeros(3), 0
    for step, (prompt_rows, clean) in zip(range(settings.steps), batches(settings, orbits), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings, step)
        entropy, balance = step_loss(network, prompt_rows, clean, settings, generator)
        optimizer.zero_grad(set_to_none=True)
        (entropy + settings.balance * balance).backward()
        length = torch.nn.utils.clip_grad_norm_(network.parameters(), settings.clip)
        optimizer.step()
        window += entropy.item(), balance.item(), length.item()
        seen += 1
        done = step + 1
        if done % 25 == 0 or done == settings.steps:
            passed = time.monotonic() - start
            loss, even, size = window / seen
            left = passed / done * (settings.steps - done)
            report(
                f"step {done}/{settings.steps}  loss {loss:.4f}  balance {even:.3f}  gradient {size:.2f}  "
                f"{passed / done:.2f} s/step  {passed / 60:.1f} min  left {left / 60:.1f} min"
            )
            window, seen = np.zeros(3), 0
        if done % snapshot_every == 0 or done == settings.steps:
            network.export_scalars()
            line = snapshot(done, model)
            if line:
                report(line)
    check_against_transformers(model, network)
    return model


@torch.no_grad()
def check_against_transformers(model: DiffusionGemmaForBlockDiffusion, network: TrainingNetwork) -> None:
    """Raise RuntimeError unless transformers' own forward gives the logits that training saw."""
    rng = np.random.default_rng(0)
    puzzles, solutions = sudoku.make_puzzles(rng, np.arange(49), np.full(8, 12))
    rows, canvases = prompts.prompt_tokens(puzzles), prompts.canvas_tokens(solutions)
    previous = 5 * torch.randn(8, CANVAS_LENGTH, tok.VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    for feedback in (None, previous):
        own = network.decode(canvases, network.encode(rows), None if feedback is None else feedback.softmax(dim=-1))
        theirs = model(input_ids=rows, decoder_input_ids=canvases, self_conditioning_logits=feedback).logits
        difference = (own - theirs).abs().max().item()
        if difference > 1e-4:
            raise RuntimeError(f"the training forward differs from transformers' by {difference:.2g}")
