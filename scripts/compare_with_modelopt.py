"""Compare bundles with nvidia-modelopt's own quantization of the same checkpoint, by the logits of the first step.

modelopt quantizes transformers' model in simulation: FP8_DEFAULT_CFG (weights and activations of all linear layers and
experts, one scale per tensor, calibrated on CHECKPOINT/calibration.jsonl) and INT4_BLOCKWISE_WEIGHT_ONLY_CFG in blocks
of 32. Both sides are measured against the unquantized model in float32, on the same prompts, canvases and random
numbers. What a bundle quantizes is its recipe's choice, which the table says; --fp8 and --int4 take several bundles.

\b
    dgcompile build examples/sudoku --target cpu --recipe fp8 -o bundles/fp8
    dgcompile build examples/sudoku --target cpu --recipe int4 -o bundles/int4
    python scripts/compare_with_modelopt.py --fp8 bundles/fp8 --int4 bundles/int4
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt
import torch

from dgcompile.checkpoint import Checkpoint
from dgcompile.evaluate.graphs import GraphSession, open_graphs
from dgcompile.evaluate.metrics import ErrorSum, kl_divergence
from dgcompile.evaluate.run import first_step_logits, read_examples
from dgcompile.quantize.calibration import read_prompts
from dgcompile.verify.reference import Reference, ReferenceCache, ReferenceStep

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "sudoku"
INT4_BLOCK = 32
FORMATS = ("fp8", "int4")
FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        format: "fp8" or "int4".
        made_by: "modelopt", or "dgcompile" with the recipe.
        details: what is quantized.
        kl: mean over prompts and positions of KL(unquantized || quantized), nats.
        largest_kl: of one position.
        relative: relative error of all logits together.
    """

    format: str
    made_by: str
    details: str
    kl: float
    largest_kl: float
    relative: float


class FirstStep:
    """Keeps the logits of a run's first denoising step, before temperature."""

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature
        self.logits: Logits | None = None

    def canvas_started(self, cache: ReferenceCache) -> None:
        """Nothing is wanted of it."""

    def stepped(self, step: ReferenceStep) -> None:
        """Takes the first."""
        if self.logits is None:
            self.logits = step.logits * np.float32(self.temperature)


def transformers_logits(reference: Reference, prompts: Sequence[Sequence[int]], config: Any, seed: int) -> list[Logits]:
    """First-step logits of transformers' model, quantized or not; prompt number i gets seed + i."""
    one_step = config.replace(max_denoising_steps=1, max_new_tokens=1)
    kept = []
    for index, ids in enumerate(prompts):
        watcher = FirstStep(one_step.temperature(1))
        reference.generate(ids, one_step, seed + index, watcher)
        assert watcher.logits is not None
        kept.append(watcher.logits)
    return kept


def quantize(reference: Reference, name: str, prompts: Sequence[Sequence[int]], config: Any) -> str:
    """Lets modelopt quantize the model in place; returns what it did.

    Raises:
        click.ClickException: modelopt passed over some experts or linear layers, as it does without a word.
    """
    import modelopt.torch.quantization as mtq

    chosen = copy.deepcopy(mtq.FP8_DEFAULT_CFG if name == "fp8" else mtq.INT4_BLOCKWISE_WEIGHT_ONLY_CFG)
    if name == "int4":
        for entry in chosen["quant_cfg"]:
            if (entry.get("cfg") or {}).get("block_sizes"):
                entry["cfg"]["block_sizes"][-1] = INT4_BLOCK

    def run(_: Any) -> None:
        # Several steps: the first one of a canvas has no self-conditioning.
        for index, ids in enumerate(prompts):
            reference.generate(ids, config, index, FirstStep(1.0))

    model = mtq.quantize(reference.model, chosen, run if name == "fp8" else None)
    spec = Checkpoint.open(reference.checkpoint).spec
    decoder = model.model.decoder
    quantizers = {name for name, module in decoder.named_modules() if getattr(module, "is_enabled", False)}
    experts = sum(".experts." in name and "weight_quantizers" in name for name in quantizers)
    dense = sum(name.endswith("_proj.weight_quantizer") for name in quantizers)
    inputs = sum("input_quantizer" in name for name in quantizers)
    wanted_experts = 2 * spec.num_experts * spec.num_hidden_layers
    wanted_dense = 3 + sum(7 if layer.has_v_proj else 6 for layer in spec.layers)
    if (experts, dense) != (wanted_experts, wanted_dense):
        raise click.ClickException(
            f"modelopt quantizes {experts} of {wanted_experts} experts' weights and {dense} of {wanted_dense} others"
        )
    return f"{experts} weights of experts, {dense} others, {inputs} inputs"


def row(name: str, made_by: str, details: str, expected: Sequence[Logits], found: Sequence[Logits]) -> Row:
    """The errors of ``found``, both a list of [L, V] per prompt."""
    kl = np.concatenate([kl_divergence(one, other) for one, other in zip(expected, found, strict=True)])
    errors = ErrorSum()
    for one, other in zip(expected, found, strict=True):
        errors.add(one, other)
    return Row(name, made_by, details, float(kl.mean()), float(kl.max()), errors.relative)


def compare(name: str, checkpoint: Path, bundles: Sequence[Path], count: int, calibration: int, seed: int) -> list[Row]:
    """The rows of one format, in this process: modelopt's second quantization of a process is not reliable."""
    torch.set_num_threads(1)
    reference = Reference(checkpoint)
    opened = Checkpoint.open(checkpoint)
    chat = opened.chat_template() is not None
    examples = read_examples(checkpoint / "prompts.jsonl", count)
    prompts = [reference.encode(str(example.prompt), chat=chat) for example in examples]
    expected = transformers_logits(reference, prompts, opened.generation, seed)
    lines = read_prompts(checkpoint / "calibration.jsonl", calibration)
    details = quantize(reference, name, [reference.encode(text, chat=chat) for _, text in lines], opened.generation)
    rows = [row(name, "modelopt", details, expected, transformers_logits(reference, prompts, opened.generation, seed))]
    for bundle in bundles:
        graphs = open_graphs(bundle)
        session = GraphSession(graphs, 1)
        kinds = graphs.recipe.weights.items()
        classes = ", ".join(f"{kind} {how.text}" for kind, how in kinds if how.format not in ("bf16", "fp32"))
        found = [first_step_logits(session, ids, seed + index) for index, ids in enumerate(prompts)]
        rows.append(row(name, f"dgcompile {graphs.recipe.name}", classes, expected, found))
    return rows


@click.command(help=__doc__)
@click.argument("checkpoint", type=FOLDER, default=EXAMPLE)
@click.option("--fp8", type=FOLDER, multiple=True, help="bundle with FP8 weights, repeatable")
@click.option("--int4", type=FOLDER, multiple=True, help="bundle with INT4 weights, repeatable")
@click.option("--prompts", default=64, show_default=True, help="how many, from all over CHECKPOINT/prompts.jsonl")
@click.option("--calibration", default=128, show_default=True, help="lines of calibration.jsonl that modelopt gets")
@click.option("--seed", default=0, show_default=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="write the rows there as well")
@click.option("--only", type=click.Choice(FORMATS), hidden=True, help="one format, in this process")
def main(
    checkpoint: Path,
    fp8: tuple[Path, ...],
    int4: tuple[Path, ...],
    prompts: int,
    calibration: int,
    seed: int,
    json_path: Path | None,
    only: str | None,
) -> None:
    bundles = {"fp8": fp8, "int4": int4}
    if only is not None:
        assert json_path is not None
        rows = compare(only, checkpoint, bundles[only], prompts, calibration, seed)
        json_path.write_text(json.dumps([asdict(each) for each in rows]))
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in FORMATS:
            made = Path(folder) / f"{name}.json"
            options = [str(checkpoint), "--only", name, "--json", str(made), "--prompts", str(prompts)]
            options += ["--calibration", str(calibration), "--seed", str(seed)]
            options += [word for bundle in bundles[name] for word in (f"--{name}", str(bundle))]
            done = subprocess.run([sys.executable, __file__, *options], capture_output=True, text=True)
            if done.returncode:
                raise click.ClickException(f"{name}: {done.stderr.strip()[-2000:]}")
            rows += [Row(**each) for each in json.loads(made.read_text())]
    click.echo(f"{prompts} prompts, first step, against float32 in transformers\n")
    click.echo("| format | made by | mean KL | largest KL | relative error | quantized |\n|---|---|---|---|---|---|")
    for each in rows:
        numbers = f"{each.kl:.2e} | {each.largest_kl:.2e} | {each.relative:.4f}"
        click.echo(f"| {each.format} | {each.made_by} | {numbers} | {each.details} |")
    if json_path is not None:
        json_path.write_text(json.dumps([asdict(each) for each in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
