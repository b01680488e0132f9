"""The ``dgcompile`` command: lazily imported subcommands, and one place that turns errors into messages and exit codes.

Exit codes: 0 done, 1 a failed stage (or ``verify``, ``evaluate`` or ``doctor`` found something, or ``batch`` only bad
lines), 2 bad input, 3 a build that another machine must finish, 130 interrupted with Ctrl-C, 141 nobody reads the
output any more.
"""

from __future__ import annotations

import os
import sys
import traceback
from importlib import import_module
from typing import Any, NoReturn

import click

import dgcompile
from dgcompile.cli import interrupt
from dgcompile.cli.command import DEBUG_KEY, debug_option
from dgcompile.cli.text import printable
from dgcompile.errors import DgcompileError, MissingDependencyError

COMMANDS = (
    "plan",
    "build",
    "generate",
    "batch",
    "serve",
    "triton",
    "verify",
    "evaluate",
    "bench",
    "inspect",
    "doctor",
    "targets",
    "recipes",
    "demo",
    "completion",
)
"""Subcommands in the order of the help; each is the ``command`` of the module ``dgcompile.cli.<name>``."""

EXTRA_PACKAGES = {
    "build": frozenset({"huggingface_hub", "matplotlib", "onnx", "onnxscript", "torch", "transformers"}),
    "serve": frozenset({"fastapi", "prometheus_client", "starlette", "uvicorn"}),
}
"""Top-level modules that only an extra installs, by its name."""

INTERRUPTED = 130
BROKEN_PIPE = 141


class CommandLine(click.Group):
    """The group: loads a subcommand when it is named, and turns what goes wrong into a message and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All subcommands, in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports the module of a subcommand; None when there is no such subcommand."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"dgcompile.cli.{cmd_name}").command
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the subcommand. Errors become one message on stderr and ``click.exceptions.Exit`` with the exit code."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except (click.ClickException, click.exceptions.Exit):
            raise  # click's own: usage errors and --help
        except BrokenPipeError:
            # The reader went away (`| head`). Nothing to say, and the interpreter must not fail to flush at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(BROKEN_PIPE)
        except KeyboardInterrupt as error:
            self._interrupted(ctx, error)
        except Exception as error:
            if interrupt.received():
                self._interrupted(ctx, error)
            debug = bool(ctx.meta.get(DEBUG_KEY))
            if debug:
                traceback.print_exception(error)
            known = _known(error)
            if known is None:
                _say(f"Error: {type(error).__name__}: {error}")
                if not debug:
                    _say("This is a fault of dgcompile. Please report it with the traceback that --debug shows.")
                ctx.exit(1)
            _say(f"Error: {known}")
            ctx.exit(known.exit_code)

    def _interrupted(self, ctx: click.Context, error: BaseException) -> NoReturn:
        """Says so, with what to do next where the command knows it."""
        next_step = str(error) if isinstance(error, KeyboardInterrupt) and error.args else ""
        _say(f"\nInterrupted: {next_step}" if next_step else "\nInterrupted")
        # If Ctrl-C came while a string was executed (importing a dataclass does that), CPython has noted that the
        # process is to die of the signal, whatever was caught since. Executing another string clears the note.
        exec("")
        ctx.exit(INTERRUPTED)


def _known(error: Exception) -> DgcompileError | None:
    """The error in the form of our own where a user can act on it; None for a fault of the program."""
    if isinstance(error, DgcompileError):
        return error
    if isinstance(error, ModuleNotFoundError) and error.name:
        for extra, packages in EXTRA_PACKAGES.items():
            if error.name.partition(".")[0] in packages:
                return MissingDependencyError(
                    f"the package {error.name!r} is not installed",
                    fix=f"install it with: pip install 'dgcompile[{extra}]'",
                )
    if isinstance(error, OSError) and error.strerror:
        return DgcompileError(f"{error.filename}: {error.strerror}" if error.filename else error.strerror)
    if isinstance(error, MemoryError):
        return DgcompileError("not enough memory")
    return None


def _say(message: str) -> None:
    """One message on stderr. Control characters that came in with a name from a file are shown, not obeyed."""
    click.echo(printable(message), err=True)


@click.group(cls=CommandLine, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(dgcompile.__version__, prog_name="dgcompile")
def cli() -> None:
    """Compile a DiffusionGemma checkpoint for one machine, and generate text with it.

    \b
    Examples:
      # Build the example for the CPU and solve a few puzzles
      dgcompile demo
      # Build a bundle, then generate with it
      dgcompile build CHECKPOINT --target cpu -o BUNDLE
      dgcompile generate BUNDLE "Why is the sky blue?"
    """


cli.params.append(debug_option())


def main() -> None:
    """Entry point of the ``dgcompile`` command."""
    interrupt.install()
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character gets a question mark, not an exception.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    cli.main(prog_name="dgcompile")
