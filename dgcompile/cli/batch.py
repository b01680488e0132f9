"""``dgcompile batch``: a file of requests, answered into a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from dgcompile.cli.command import FOLDER, Command, json_option
from dgcompile.cli.text import format_seconds, print_json

if TYPE_CHECKING:
    from dgcompile.serving.bulk.run import BulkReport

FILE = click.Path(path_type=Path)


@click.command(
    "batch",
    cls=Command,
    examples=[
        ("batch BUNDLE in.jsonl out.jsonl", "Answer every line; after a kill, the same command goes on"),
        ("batch BUNDLE in.jsonl out.jsonl --unordered", "Write each answer as soon as it is there"),
        ("batch BUNDLE in.jsonl out.jsonl --max-new-tokens 512", "For lines that do not say"),
        ("batch BUNDLE in.jsonl out.jsonl --json | jq .bad", "For a script"),
    ],
)
@click.argument("bundle", type=FOLDER)
@click.argument("source", metavar="IN.jsonl", type=FILE)
@click.argument("output", metavar="OUT.jsonl", type=FILE)
@click.option("--unordered", is_flag=True, help="Write answers as they come, not in the order of IN.jsonl.")
@click.option("--rows", type=click.IntRange(1), help="Requests that share a step.  [default: the bundle's, 8 on a CPU]")
@click.option("--max-new-tokens", type=int, help="Most tokens of an answer, for lines that do not say.")
@click.option("--max-denoising-steps", type=int, help="Most denoising steps per canvas, likewise.")
@click.option("--t-min", type=float, help="Temperature of the last step, likewise.")
@click.option("--t-max", type=float, help="Temperature of the first step, likewise.")
@click.option("--entropy-bound", type=float, help="Entropy of the tokens accepted in one step together, likewise.")
@click.option(
    "--seed",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    metavar="N",
    help="A line without a seed gets N plus its number.",
)
@click.option("--threads", type=int, help="Threads of the engine.  [default: its own choice]")
@click.option("--token-ids", is_flag=True, help="Write token_ids too.")
@click.option("--overwrite", is_flag=True, help="Replace OUT.jsonl, or what another run left unfinished.")
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    bundle: Path,
    source: Path,
    output: Path,
    unordered: bool,
    rows: int | None,
    seed: int,
    threads: int | None,
    token_ids: bool,
    overwrite: bool,
    as_json: bool,
    **options: int | float | None,
) -> None:
    """Answer every line of IN.jsonl into OUT.jsonl with BUNDLE.

    A line is a JSON object with one of text, messages, prompt and input_ids, and if need be id, seed, max_new_tokens,
    max_denoising_steps, t_min, t_max, entropy_bound and stop.

    OUT.jsonl appears when every line is done. After an interruption or a kill the same command goes on: no line is
    lost or answered twice.

    Bad lines go to OUT.errors.jsonl with their numbers and never stop the run. Exit code 0, unless all lines were bad.
    """
    from dgcompile.cli.render import progress
    from dgcompile.serving.bulk.records import BulkOptions
    from dgcompile.serving.bulk.run import run_bulk
    from dgcompile.serving.service import Service

    shown = progress()
    defaults = {name: value for name, value in options.items() if value is not None}
    try:
        report = run_bulk(
            lambda: Service.open(bundle, rows=rows, threads=threads, progress=shown),
            bundle,
            source,
            output,
            BulkOptions(defaults=defaults, seed=seed, token_ids=token_ids, ordered=not unordered),
            overwrite=overwrite,
            progress=shown,
        )
    except KeyboardInterrupt:
        raise KeyboardInterrupt("run the same command again: it goes on after the lines that are done") from None
    if as_json:
        print_json(_facts(report, output))
    else:
        _print(report, output)
    if report.lines and report.bad == report.lines:
        ctx.exit(1)


def _facts(report: BulkReport, output: Path) -> dict[str, object]:
    return {
        "output": str(output),
        "errors": None if report.errors is None else str(report.errors),
        "lines": report.lines,
        "answered": report.answered,
        "bad": report.bad,
        "done_before": report.done_before,
        "output_tokens": report.output_tokens,
        "new_tokens": report.new_tokens,
        "steps": report.steps,
        "rows_per_step": round(report.rows_per_step, 2),
        "seconds": round(report.seconds, 3),
        "tokens_per_second": round(report.tokens_per_second, 2),
    }


def _print(report: BulkReport, output: Path) -> None:
    """The summary, on stderr: stdout is for results, and those are in the files."""
    before = f", {report.done_before} of them before" if report.done_before else ""
    click.echo(
        f"{output}: {report.answered} of {report.lines} lines answered{before}; {report.new_tokens} tokens in "
        f"{format_seconds(report.seconds)} ({report.tokens_per_second:.1f} tokens/s), "
        f"{report.rows_per_step:.1f} rows per step",
        err=True,
    )
    if report.bad:
        lines = "line is" if report.bad == 1 else "lines are"
        click.echo(f"Warning: {report.bad} {lines} bad; {report.errors} says why", err=True)
