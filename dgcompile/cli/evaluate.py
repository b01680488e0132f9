"""``dgcompile evaluate``: what a bundle costs in accuracy."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dgcompile.cli.command import FOLDER, Command, json_option
from dgcompile.cli.text import print_json
from dgcompile.errors import RequestError

if TYPE_CHECKING:
    from dgcompile.evaluate import EvaluationReport


@click.command(
    "evaluate",
    cls=Command,
    examples=[
        ("evaluate BUNDLE --against CHECKPOINT", "64 prompts of the checkpoint's own prompts.jsonl"),
        ("evaluate BUNDLE --against CHECKPOINT --html report.html", "With plots, as one file for a browser"),
        ("evaluate BUNDLE --against OTHER --prompts my.jsonl", "Against another bundle, without PyTorch"),
        ("evaluate BUNDLE --against CHECKPOINT --max-kl 0.01", "For CI: exit code 1 when it lost more than that"),
    ],
)
@click.argument("bundle", type=FOLDER)
@click.option(
    "--against",
    required=True,
    metavar="CHECKPOINT|BUNDLE",
    help="The unquantized model: a checkpoint's folder or hub id, or another bundle.",
)
@click.option(
    "--prompts",
    type=click.Path(dir_okay=False, path_type=Path),
    help='File with one {"prompt": "...", "answer": "..."} a line, the answer optional.  '
    "[default: CHECKPOINT/prompts.jsonl]",
)
@click.option("--limit", type=click.IntRange(1), default=64, show_default=True, help="Prompts to take from that file.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the first prompt.")
@click.option("--max-new-tokens", type=int, help="Most tokens of each answer.")
@click.option("--threads", type=int, help="Threads of both sides.  [default: their own choice]")
@click.option("--max-kl", type=click.FloatRange(0), help="Exit with code 1 when the first step's KL exceeds this.")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Also write a page with plots here.")
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    bundle: Path,
    against: str,
    prompts: Path | None,
    limit: int,
    seed: int,
    max_new_tokens: int | None,
    threads: int | None,
    max_kl: float | None,
    html: Path | None,
    as_json: bool,
) -> None:
    """Measure what BUNDLE costs in accuracy against the unquantized model, on the same prompts and random numbers.

    Of a bundle for a GPU the graphs are evaluated, in float32 on the CPU; its engines need not be there.

    Exit code 0, whatever was found, unless --max-kl is given.
    """
    if max_kl is not None and math.isnan(max_kl):
        raise click.UsageError("--max-kl is not a number")
    from dgcompile.cli.render import progress
    from dgcompile.evaluate import evaluate, read_examples
    from dgcompile.files import write_atomically

    if html is not None:
        if not html.absolute().parent.is_dir():
            raise RequestError(f"{html.parent} is no folder", expected="an existing folder for the page")
        # Before the work rather than after it: it may not be installed.
        from dgcompile.evaluate.html import render_html

    report = evaluate(
        bundle,
        against,
        prompts=read_examples(_prompts_file(prompts, against), limit),
        seed=seed,
        max_new_tokens=max_new_tokens,
        threads=threads,
        progress=progress(),
    )
    if html is not None:
        write_atomically(html, render_html(report).encode())
    if as_json:
        print_json(report.model_dump(mode="json"))
    else:
        _print(report)
    if max_kl is not None and not report.first_step.kl <= max_kl:
        click.echo(f"the first step's KL is {report.first_step.kl:.3g} nats, more than {max_kl:g}", err=True)
        ctx.exit(1)


def _prompts_file(given: Path | None, against: str) -> Path:
    """The file of prompts: the one named, or the one beside the checkpoint."""
    file = given or Path(against) / "prompts.jsonl"
    if given is None and not file.is_file():
        if not Path(against).is_dir():
            raise RequestError(f"no such folder: {against}", expected="a checkpoint's or a bundle's folder")
        raise RequestError(f"{against} has no prompts.jsonl", fix="name a file with --prompts")
    return file


def _print(report: EvaluationReport) -> None:
    from dgcompile.cli.render import console, print_facts, print_table
    from dgcompile.evaluate.summary import facts, tables

    print_facts(facts(report))
    for table in tables(report):
        console().print(f"\n{table.title}")
        print_table(table.columns, table.rows, right=frozenset(table.columns) - {"class"})
