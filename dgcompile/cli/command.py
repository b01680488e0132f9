"""What all subcommands share: examples in their help, ``--debug``, ``--json`` and completion of names.

Command modules import this and click, nothing heavier: ``dgcompile --help`` loads all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

F = TypeVar("F", bound=Callable[..., Any])

DEBUG_KEY = "dgcompile.debug"
"""Key of ``click.Context.meta`` that holds whether a traceback is wanted."""


class Command(click.Command):
    """A click command whose help ends with examples.

    Args:
        examples: pairs (command line without the leading ``dgcompile``, what it does).
    """

    def __init__(self, *args: Any, examples: Sequence[tuple[str, str]] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = tuple(examples)
        self.params.append(debug_option())

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the examples, one command a line, so that each can be copied whole."""
        if self.examples:
            with formatter.section("Examples"):
                for line, meaning in self.examples:
                    formatter.write(f"{'':{formatter.current_indent}}# {meaning}\n")
                    formatter.write(f"{'':{formatter.current_indent}}dgcompile {line}\n")
        super().format_epilog(ctx, formatter)


def debug_option() -> click.Option:
    """``--debug``, accepted before and after the subcommand."""

    def remember(ctx: click.Context, _: click.Parameter, value: bool) -> None:
        if value:
            ctx.meta[DEBUG_KEY] = True

    return click.Option(
        ["--debug"], is_flag=True, expose_value=False, callback=remember, help="Show the traceback of an error."
    )


def json_option(function: F) -> F:
    """Adds ``--json``, passed on as ``as_json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")(function)


def _matching(names: Sequence[str], incomplete: str) -> list[CompletionItem]:
    """Names that begin with ``incomplete``, then what the shell knows about files: a path is allowed too."""
    found = [CompletionItem(name) for name in names if name.startswith(incomplete)]
    return found or [CompletionItem(incomplete, type="file")]


def complete_target(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Shell completion of target names."""
    from dgcompile.target import list_targets

    return _matching(list_targets(), incomplete)


def complete_recipe(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Shell completion of recipe names."""
    from dgcompile.recipe import list_recipes

    return _matching(list_recipes(), incomplete)


FOLDER = click.Path(file_okay=False, path_type=Path)
"""A folder argument. Whether it exists is the library's question: its message says more than click's."""
