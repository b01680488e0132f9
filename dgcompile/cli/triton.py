"""``dgcompile triton``: a model repository for Triton Inference Server."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path

import click

from dgcompile.cli.command import FOLDER, Command, json_option
from dgcompile.cli.text import print_json, printable

PROBLEMS_FOUND = 2


@click.command(
    "triton",
    cls=Command,
    examples=[
        ("triton BUNDLE -o model_repository", "Then: tritonserver --model-repository=model_repository"),
        (
            "triton BUNDLE -o model_repository --bundle-path /bundles/dg",
            "For a container that sees the bundle at /bundles/dg",
        ),
        ("triton BUNDLE -o model_repository --copy", "With the bundle inside, to be shipped as one folder"),
        ("triton --check model_repository", "Is it right? Needs no server"),
    ],
)
@click.argument("bundle", type=FOLDER, required=False)
@click.option("-o", "--output", type=FOLDER, help="The model repository; made if there is none.")
@click.option("--name", help="What clients call the model.  [default: diffusiongemma]")
@click.option("--rows", type=int, help="Requests that share a denoising step.  [default: the bundle's; on the CPU, 8]")
@click.option("--queue-limit", type=int, help="Requests that may wait for a row.  [default: 256]")
@click.option("--threads", type=int, help="Threads of the engine, on the CPU.  [default: its own choice]")
@click.option("--bundle-path", metavar="PATH", help="Where the server finds the bundle, if not where it lies now.")
@click.option("--copy", is_flag=True, help="Put a copy of the bundle into the repository.")
@click.option("--overwrite", is_flag=True, help="Replace the model, if dgcompile wrote it.")
@click.option("--check", type=FOLDER, metavar="REPOSITORY", help="Check a repository instead of writing one.")
@json_option
def command(
    bundle: Path | None,
    output: Path | None,
    name: str | None,
    rows: int | None,
    queue_limit: int | None,
    threads: int | None,
    bundle_path: str | None,
    copy: bool,
    overwrite: bool,
    check: Path | None,
    as_json: bool,
) -> None:
    """Write BUNDLE as a model into a repository of Triton Inference Server, or check one.

    The server needs dgcompile in the Python that runs its python backend. A check that finds something ends with exit
    code 2.
    """
    if check is not None:
        given = (bundle, output, name, rows, queue_limit, threads, bundle_path, copy or None, overwrite or None)
        if any(value is not None for value in given):
            raise click.UsageError("--check takes no BUNDLE and no other option than --json.")
        _check(check, as_json)
        return
    if bundle is None or output is None:
        raise click.UsageError("Give a BUNDLE and -o REPOSITORY, or --check REPOSITORY.")
    if copy and bundle_path is not None:
        raise click.UsageError("Give --bundle-path or --copy, not both.")

    from dgcompile.cli.render import progress
    from dgcompile.serving.triton.repository import DEFAULT_NAME, write_model

    folder = write_model(
        bundle,
        output,
        name=DEFAULT_NAME if name is None else name,
        rows=rows,
        queue_limit=queue_limit,
        threads=threads,
        bundle_path_there=bundle_path,
        copy=copy,
        overwrite=overwrite,
        progress=progress(),
    )
    if as_json:
        print_json({"model": folder.name, "folder": str(folder)})
        return
    click.echo(f"wrote {printable(str(folder))}")
    click.echo(f"start it with: tritonserver --model-repository={printable(shlex.quote(str(output.resolve())))}")


def _check(repository: Path, as_json: bool) -> None:
    """Prints a report; a line for each problem."""
    from dgcompile.cli.render import progress
    from dgcompile.serving.triton.check import check_repository

    report = check_repository(repository, progress=progress())
    if as_json:
        print_json(asdict(report))
    else:
        for problem in report.problems:
            click.echo(printable(f"{problem.file}: {problem.found}; {problem.fix}").replace("\n", " "))
        for note in report.notes:
            click.echo(printable(f"note: {note}"))
        for other in report.others:
            click.echo(printable(f"note: {repository / other} was not written by dgcompile: not checked"))
        if not report.problems:
            click.echo(printable(f"{', '.join(report.models)}: nothing is wrong"))
    if report.problems:
        click.get_current_context().exit(PROBLEMS_FOUND)
