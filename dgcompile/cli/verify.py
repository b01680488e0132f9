"""``dgcompile verify``: does a bundle say what transformers says?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dgcompile.cli.command import FOLDER, Command, json_option
from dgcompile.cli.text import print_json
from dgcompile.errors import RequestError

if TYPE_CHECKING:
    from dgcompile.verify import Difference, VerifyReport

SHOWN_DIFFERENCES = 20


@click.command(
    "verify",
    cls=Command,
    examples=[
        ("verify BUNDLE --against CHECKPOINT", "200 pairs of the checkpoint's own prompts.jsonl"),
        ("verify BUNDLE --against CHECKPOINT --prompts my.jsonl --pairs 9", 'Own prompts: {"prompt": "..."} a line'),
        ("verify BUNDLE --against CHECKPOINT --json | jq .failures", "For a script"),
        ("verify BUNDLE --backend onnxruntime", "A GPU's engines against their own graphs on the CPU"),
    ],
)
@click.argument("bundle", type=FOLDER)
@click.option("--against", "checkpoint", metavar="CHECKPOINT", help="Checkpoint folder or hub id.")
@click.option(
    "--backend",
    type=click.Choice(["onnxruntime"]),
    help="What to compare a GPU's engines with, instead of a checkpoint.",
)
@click.option(
    "--prompts",
    type=click.Path(dir_okay=False, path_type=Path),
    help='File with one {"prompt": "..."} a line.  [default: CHECKPOINT/prompts.jsonl]',
)
@click.option("--pairs", type=click.IntRange(1), default=200, show_default=True, help="Prompts times seeds to compare.")
@click.option("--max-new-tokens", type=int, help="Most tokens of each answer.")
@click.option("--threads", type=int, help="Threads of both sides.  [default: their own choice]")
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    bundle: Path,
    checkpoint: str | None,
    backend: str | None,
    prompts: Path | None,
    pairs: int,
    max_new_tokens: int | None,
    threads: int | None,
    as_json: bool,
) -> None:
    """Compare BUNDLE with its checkpoint in transformers, token for token, on the same random numbers.

    With --backend, compare the engines of a bundle for a GPU with its own ONNX graphs, output for output: two encoder
    calls and two denoising steps on random tokens. This runs on the machine with the GPU and needs no checkpoint.

    A quantized bundle is expected to differ, unless the checkpoint was quantized alike: `dgcompile evaluate` measures
    by how much.

    Exit code 0: every difference, if any, is explained by rounding. 1: the bundle differs.
    """
    from dgcompile.cli.render import progress

    if (checkpoint is None) == (backend is None):
        raise click.UsageError("give one of --against CHECKPOINT and --backend onnxruntime")
    if checkpoint is None:
        _compare_backends(ctx, bundle, as_json)
        return
    from dgcompile.verify import read_prompts, verify

    texts, seeds = _spread(read_prompts(_prompts_file(prompts, checkpoint)), pairs)
    report = verify(
        bundle,
        checkpoint,
        prompts=texts,
        seeds=seeds,
        max_new_tokens=max_new_tokens,
        threads=threads,
        progress=progress(),
    )
    if as_json:
        print_json(report.model_dump(mode="json"))
    else:
        _print(report)
    if not report.ok:
        ctx.exit(1)


def _compare_backends(ctx: click.Context, bundle: Path, as_json: bool) -> None:
    from dgcompile.cli.render import console, print_table, progress
    from dgcompile.verify.backends import compare_backends

    report = compare_backends(bundle, progress=progress())
    if as_json:
        print_json({**report.model_dump(mode="json"), "ok": report.ok})
    else:
        print_table(
            ("call", "output", "error", "bound", "verdict"),
            [
                (
                    output.call,
                    output.output,
                    f"{output.error:.1e}",
                    f"{output.bound:.1e}",
                    "ok" if output.ok else "FAILURE",
                )
                for output in report.outputs
            ],
            right=frozenset({"error", "bound"}),
        )
        console().print(f"\nthe engines {'compute what their graphs say' if report.ok else 'DIFFER from their graphs'}")
    if not report.ok:
        ctx.exit(1)


def _prompts_file(given: Path | None, checkpoint: str) -> Path:
    """The file of prompts: the one named, or the one beside the checkpoint."""
    file = given or Path(checkpoint) / "prompts.jsonl"
    if given is None and not file.is_file():
        raise RequestError(f"{checkpoint} has no prompts.jsonl", fix="name a file with --prompts")
    return file


def _spread(prompts: Sequence[str], pairs: int) -> tuple[list[str], range]:
    """Prompts from all over the file and as many seeds as it takes to have at least ``pairs`` pairs."""
    seeds = -(-pairs // len(prompts))
    count = -(-pairs // seeds)
    return [prompts[index * len(prompts) // count] for index in range(count)], range(seeds)


def _print(report: VerifyReport) -> None:
    from dgcompile.cli.render import console, print_facts, print_table

    out = console()
    errors = report.errors
    print_facts(
        {
            "bundle": report.bundle,
            "against": report.checkpoint + ("" if report.same_checkpoint else " (NOT what the bundle was built from)"),
            "identical texts": f"{report.exact_pairs} of {len(report.pairs)} pairs, {report.canvases} canvases",
            "ties": f"{report.ties} (margin at most {report.tie_bound:g}: rounding decides)",
            "drifts": f"{report.drifts} (the model amplified rounding; every single step agrees)",
            "failures": f"{report.failures}",
            "engine errors": f"keys {errors.keys:.1e}, values {errors.values:.1e}, self-conditioning "
            f"{errors.self_conditioning:.1e} (relative), entropy {errors.entropy:.1e} nats; bound "
            f"{report.error_bound:g}",
            "engine calls": f"{errors.encoder_calls} encoder, {errors.denoiser_calls} denoiser; "
            f"{errors.left_out} errors left out near a router tie",
        }
    )
    out.print()
    print_table(
        ("step", "canvases", "identical"),
        [(f"{share.step}", f"{share.canvases}", f"{share.identical}") for share in report.step_shares],
        right=frozenset({"step", "canvases", "identical"}),
    )
    differences = [(pair.prompt, pair.seed, difference) for pair in report.pairs for difference in pair.differences]
    # What nothing explains comes first.
    differences.sort(key=lambda item: item[2].reason is not None)
    if differences:
        out.print()
        print_table(
            ("prompt", "seed", "what", "where", "expected", "found", "margin", "verdict"),
            [
                (
                    f"{prompt}",
                    f"{seed}",
                    difference.kind,
                    _place(difference),
                    *_values(difference),
                    _verdict(difference),
                )
                for prompt, seed, difference in differences[:SHOWN_DIFFERENCES]
            ],
        )
        if len(differences) > SHOWN_DIFFERENCES:
            out.print(f"and {len(differences) - SHOWN_DIFFERENCES} more: --json lists all")
    out.print()
    out.print("the bundle says what transformers says" if report.ok else "the bundle DIFFERS from transformers")
    if report.quantized and not report.ok:
        out.print("Its recipe rounds what transformers does not: `dgcompile evaluate` measures what that costs.")


def _place(difference: Difference) -> str:
    """``canvas 1 step 3 position 17``, numbered as a person counts canvases."""
    parts = []
    if difference.canvas is not None:
        parts.append(f"canvas {difference.canvas + 1}")
    if difference.step is not None:
        parts.append(f"step {difference.step}")
    if difference.position is not None:
        parts.append(f"position {difference.position}")
    return " ".join(parts)


def _values(difference: Difference) -> tuple[str, str, str]:
    margin = "-" if difference.margin is None else f"{difference.margin:.1e}"
    expected, found = ("-" if value is None else str(value) for value in (difference.expected, difference.found))
    return expected, found, margin


def _verdict(difference: Difference) -> str:
    return difference.reason or "FAILURE"
