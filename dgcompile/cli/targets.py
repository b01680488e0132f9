"""``dgcompile targets``: what a bundle can be built for."""

from __future__ import annotations

import click

from dgcompile.cli.command import Command, json_option
from dgcompile.cli.text import format_bytes, print_json


@click.command(
    "targets",
    cls=Command,
    examples=[("targets", "A table"), ("targets --json | jq '.[].name'", "The same facts for a script")],
)
@json_option
def command(as_json: bool) -> None:
    """List the targets: what a bundle can be built for.

    A target is a YAML file; `dgcompile build --target FILE.yaml` takes one of your own.
    """
    from dgcompile.target import Target, list_targets

    targets = [Target.load(name) for name in list_targets()]
    if as_json:
        print_json([target.model_dump(mode="json") for target in targets])
        return
    from dgcompile.cli.render import print_table

    print_table(
        ("target", "machine", "backend", "memory", "bandwidth", "recipe"),
        [
            (
                target.name,
                target.title,
                target.backend,
                format_bytes(target.memory_bytes) if target.memory_bytes else "-",
                format_bytes(target.memory_bandwidth) + "/s" if target.memory_bandwidth else "-",
                target.default_recipe,
            )
            for target in targets
        ],
        right=frozenset({"memory", "bandwidth"}),
    )
