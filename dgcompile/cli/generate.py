"""``dgcompile generate``: text from a bundle."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import click

from dgcompile.cli.command import FOLDER, Command, json_option
from dgcompile.cli.text import format_seconds, print_json, printable
from dgcompile.errors import RequestError


@click.command(
    "generate",
    cls=Command,
    examples=[
        ('generate BUNDLE "Why is the sky blue?"', "Answer a prompt"),
        ("generate BUNDLE - --watch < prompt.txt", "Read the prompt from stdin and watch the canvas being denoised"),
        ("generate BUNDLE --seed 7 --json PROMPT | jq .text", "For a script"),
    ],
)
@click.argument("bundle", type=FOLDER)
@click.argument("prompt", required=False)
@click.option("--max-new-tokens", type=int, help="Most tokens to generate.")
@click.option("--max-denoising-steps", type=int, help="Most denoising steps per canvas.")
@click.option("--t-min", type=float, help="Temperature of the last step.")
@click.option("--t-max", type=float, help="Temperature of the first step.")
@click.option("--entropy-bound", type=float, help="Entropy that the tokens accepted in one step may have together.")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed gives the same text.")
@click.option("--threads", type=int, help="Threads of the engine.  [default: its own choice]")
@click.option("--raw", is_flag=True, help="Give the prompt to the model as it is, without the chat template.")
@click.option("--watch", is_flag=True, help="Show the canvas while it is denoised (on stderr).")
@json_option
def command(
    bundle: Path,
    prompt: str | None,
    seed: int,
    threads: int | None,
    raw: bool,
    watch: bool,
    as_json: bool,
    **options: int | float | None,
) -> None:
    """Generate text from PROMPT with BUNDLE. `-` reads the prompt from stdin, and so does a missing one in a pipe.

    The text goes to stdout, statistics to stderr. Options that are not given are the checkpoint's own.
    """
    text = _read_prompt(prompt)

    from dgcompile.cli.render import progress
    from dgcompile.runtime.pipeline import Pipeline

    pipeline = Pipeline.open(bundle, threads, progress=progress())
    if not raw and pipeline.chat_template is None:
        raise RequestError(f"{bundle} has no chat template", fix="give --raw to send the prompt as it is")
    token_ids = pipeline.encode(text if raw else [{"role": "user", "content": text}])
    config = pipeline.bundle.generation.replace(**{name: value for name, value in options.items() if value is not None})

    started = time.monotonic()
    if watch:
        from dgcompile.cli.watch import watching

        with watching(pipeline, config) as on_step:
            result = pipeline.generate([token_ids], config, [seed], on_step)[0]
    else:
        result = pipeline.generate([token_ids], config, [seed])[0]
    seconds = time.monotonic() - started

    answer = pipeline.decode(result.token_ids)
    count = len(result.token_ids)
    facts: dict[str, Any] = {
        "text": answer,
        "tokens": count,
        "token_ids": result.token_ids,
        "prompt_tokens": len(token_ids),
        "steps_per_canvas": result.steps_per_canvas,
        "seconds": round(seconds, 4),
        "tokens_per_second": round(count / seconds, 2),
        "finish_reason": result.finish_reason,
        "seed": seed,
    }
    if as_json:
        print_json(facts)
        return
    sys.stdout.write((printable(answer) if sys.stdout.isatty() else answer).rstrip("\n") + "\n")
    sys.stdout.flush()
    steps = sum(result.steps_per_canvas)
    click.echo(
        f"{count} tokens in {format_seconds(seconds)} ({count / seconds:.1f} tokens/s), {steps} denoising "
        f"{'step' if steps == 1 else 'steps'}, finished by {result.finish_reason}, seed {seed}",
        err=True,
    )


def _read_prompt(prompt: str | None) -> str:
    """The prompt's text, from the argument or from stdin."""
    if prompt is None and sys.stdin.isatty():
        raise click.UsageError("Missing argument 'PROMPT': give a text, or - to read it from stdin.")
    try:
        if prompt is None or prompt == "-":
            return sys.stdin.buffer.read().decode()
        prompt.encode()  # an argument that was no UTF-8 carries surrogates
        return prompt
    except UnicodeError as error:
        raise RequestError(f"the prompt is not UTF-8 text: {error}") from error
