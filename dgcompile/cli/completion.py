"""``dgcompile completion``: the script that makes a shell complete dgcompile's commands, options and names."""

from __future__ import annotations

import sys

import click
from click.shell_completion import get_completion_class

from dgcompile.cli.command import Command

SHELLS = ("bash", "zsh", "fish")


@click.command(
    "completion",
    cls=Command,
    examples=[
        ("completion bash >> ~/.bashrc", "bash, for good"),
        ("completion zsh >> ~/.zshrc", "zsh, for good"),
        ("completion fish > ~/.config/fish/completions/dgcompile.fish", "fish, for good"),
    ],
)
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print the completion script of a shell.

    It completes commands, options, files, and the names of targets and recipes.
    """
    script = get_completion_class(shell)
    assert script is not None  # SHELLS are click's own
    group = ctx.find_root().command
    # Not `source()`: for bash it first runs bash to learn its version, and bash may be absent where the script is made.
    completer = script(group, {}, "dgcompile", "_DGCOMPILE_COMPLETE")
    sys.stdout.write(completer.source_template % completer.source_vars() + "\n")
