"""``dgcompile bench``: what a bundle takes here, beside others, transformers and the machine's floor."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from dgcompile.cli.command import FOLDER, Command, json_option
from dgcompile.cli.text import format_bytes, print_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dgcompile.bench.report import BenchReport, ContenderReport
    from dgcompile.bench.turns import Figure


@click.command(
    "bench",
    cls=Command,
    examples=[
        ("bench BUNDLE", "Times of one bundle, next to what this machine could do at best"),
        ("bench FP32_BUNDLE INT4_BUNDLE --past 128 --past 4096", "Two builds of one model, at two lengths"),
        ("bench BUNDLE --against transformers --checkpoint CHECKPOINT", "Beside transformers at its best"),
        ("bench BUNDLE --turns 3 --json | jq .contenders[0].step_seconds", "Fewer turns, for a script"),
    ],
)
@click.argument("bundles", metavar="BUNDLE...", type=FOLDER, nargs=-1, required=True)
@click.option("--against", type=click.Choice(["transformers"]), help="Whom to measure besides; needs --checkpoint.")
@click.option("--checkpoint", metavar="CHECKPOINT", help="Checkpoint folder or hub id, for --against.")
@click.option(
    "--variant",
    metavar="NAME",
    help="How to run transformers, such as float32,grouped_mm,compile.  [default: the fastest of those tried first]",
)
@click.option("--prompt-tokens", type=int, default=512, show_default=True, help="Tokens of the prompt.")
@click.option("--new-tokens", type=int, default=512, show_default=True, help="Tokens to generate.")
@click.option("--steps", type=int, default=8, show_default=True, help="Denoising steps of each canvas, exactly.")
@click.option(
    "--past",
    "pasts",
    type=int,
    multiple=True,
    help="Cached tokens at which the denoising step is timed; may be repeated.  [default: --prompt-tokens]",
)
@click.option("--threads", type=int, help="Threads of each contender.  [default: physical cores]")
@click.option("--turns", type=int, default=7, show_default=True, help="Turns of each contender, after a warm-up.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the prompts and the random numbers.")
@json_option
def command(
    bundles: tuple[Path, ...],
    against: str | None,
    checkpoint: str | None,
    variant: str | None,
    prompt_tokens: int,
    new_tokens: int,
    steps: int,
    pasts: tuple[int, ...],
    threads: int | None,
    turns: int,
    seed: int,
    as_json: bool,
) -> None:
    """Measure BUNDLEs of one model: denoising step, encoder, end-to-end speed, memory, start.

    Each contender has a process of its own, and they take turns: A B A B. All do the same work, with the same prompts,
    canvases, random numbers and numbers of steps. Ratios are to the first bundle.
    """
    if (against is None) != (checkpoint is None):
        raise click.UsageError("--against transformers and --checkpoint CHECKPOINT belong together")
    if variant is not None and against is None:
        raise click.UsageError("--variant says how to run transformers: give --against transformers too")

    from dgcompile.bench.bench import bench
    from dgcompile.bench.job import Settings
    from dgcompile.bench.machine import physical_cores
    from dgcompile.bench.variant import Variant
    from dgcompile.cli.render import progress

    report = bench(
        bundles,
        Settings(
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            steps=steps,
            pasts=tuple(sorted(set(pasts))) or (prompt_tokens,),
            threads=physical_cores() if threads is None else threads,
            turns=turns,
            seed=seed,
        ),
        checkpoint=checkpoint,
        variant=None if variant is None else Variant.parse(variant),
        progress=progress(),
    )
    if as_json:
        print_json(report.model_dump(mode="json"))
    else:
        _print(report)


def _print(report: BenchReport) -> None:
    from dgcompile.cli.render import console, print_facts, print_table

    out, settings = console(), report.settings
    print_facts({one.label: f"{one.name} ({one.title})" for one in report.contenders})
    out.print()
    print_facts(
        {
            "machine": f"{report.machine.cpu}, {settings.threads} of {report.machine.cores} cores",
            "libraries": ", ".join(f"{name} {version}" for name, version in report.machine.packages.items()),
            "work": f"prompt of {settings.prompt_tokens} tokens, {settings.new_tokens} new ones, {settings.steps} "
            f"steps a canvas, batch 1, seed {settings.seed}",
            "turns": f"{settings.turns} of each, in alternation; spread is "
            f"{report.contenders[0].generate_seconds.spread}",
        }
    )
    if report.probes:
        out.print()
        print_table(
            ("transformers tried", "step", "outcome"),
            [
                (probe.variant, "-" if probe.step_seconds is None else _seconds(probe.step_seconds), probe.outcome)
                for probe in report.probes
            ],
            right=frozenset({"step"}),
        )
    out.print()
    print_table(
        ("figure", "", "median", "spread", "ratio", "floors"),
        list(_rows(report)),
        right=frozenset({"median", "spread", "ratio", "floors"}),
    )
    if report.floor is not None:
        out.print()
        _print_floor(report)
    for warning in report.warnings:
        out.print(f"\nWARNING: {warning}")


def _rows(report: BenchReport) -> Iterator[tuple[str, ...]]:
    """Each figure, contender by contender."""
    for past in report.settings.pasts:
        for one in report.contenders:
            floors = one.above_floor.get(past)
            yield _row(f"step, past {past}", one, one.step_seconds[past], "" if floors is None else f"{floors:.2f}")
    for title, name in (
        ("encoder, prompt", "encoder_seconds"),
        ("encoder, per token", "encoder_seconds_per_token"),
        ("generate", "generate_seconds"),
        ("tokens/s", "tokens_per_second"),
        ("import", "import_seconds"),
        ("open", "open_seconds"),
        ("first step", "first_step_seconds"),
        ("start, all of it", "load_seconds"),
    ):
        for one in report.contenders:
            yield _row(title, one, getattr(one, name), "", plain=name == "tokens_per_second")
    for one in report.contenders:
        ratio = "" if one.memory_ratio is None else f"{one.memory_ratio:.2f}"
        yield ("memory, peak", one.label, _bytes(one.memory.peak_rss), "", ratio, "")
    for one in report.contenders:
        yield ("memory, anonymous", one.label, _bytes(one.memory.peak_anonymous), "", "", "")


def _row(title: str, one: ContenderReport, figure: Figure, floors: str, *, plain: bool = False) -> tuple[str, ...]:
    show = _number if plain else _seconds
    ratio = "" if figure.ratio is None else f"{figure.ratio:.2f}"
    return (title, one.label, show(figure.median), f"{show(figure.low)} - {show(figure.high)}", ratio, floors)


def _print_floor(report: BenchReport) -> None:
    from dgcompile.cli.render import console, print_facts, print_table

    floor = report.floor
    assert floor is not None
    print_table(
        ("floor, float32", "GFLOP", "bytes", "products", "memory", "floor"),
        [
            (
                f"step, past {step.past}",
                f"{sum(step.flops.values()) / 1e9:.3g}",
                format_bytes(step.bytes),
                _seconds(step.compute_seconds),
                _seconds(step.memory_seconds),
                _seconds(step.seconds),
            )
            for step in floor.steps
        ],
        right=frozenset({"GFLOP", "bytes", "products", "memory", "floor"}),
    )
    console().print()
    first = floor.steps[0]
    print_facts(
        {
            "reached here": f"{floor.flops_per_second / 1e9:.3g} GFLOP/s in a float32 product, "
            f"{format_bytes(floor.bytes_per_second)}/s in a copy (read and written)",
            f"GFLOP, past {first.past}": ", ".join(
                f"{kind} {flops / 1e9:.3g}" for kind, flops in first.flops.items() if flops
            ),
        }
    )


def _seconds(value: float) -> str:
    """Three digits in the unit that suits: ``412 ms``, ``1.22 s``, ``57.1 us``."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if value >= scale:
            return f"{_number(value / scale)} {unit}"
    return f"{_number(value / 1e-6)} us"


def _number(value: float) -> str:
    """Three digits, never as a power of ten."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _bytes(size: int | None) -> str:
    return "-" if size is None else format_bytes(size)
