"""``dgcompile doctor``: what this machine can build and run, and what it lacks for the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dgcompile.cli.command import Command, complete_target, json_option
from dgcompile.cli.text import format_bytes, print_json, printable

if TYPE_CHECKING:
    from dgcompile.doctor import Diagnosis


@click.command(
    "doctor",
    cls=Command,
    examples=[
        ("doctor", "What is installed, and which targets this machine can build and run"),
        ("doctor --target rtx5090", "Only that target; exit code 1 when it cannot run here"),
        ("doctor --json | jq .abilities", "The same for a script"),
    ],
)
@click.option("--target", shell_complete=complete_target, help="Look at this target only: a name or a YAML file.")
@json_option
def command(target: str | None, as_json: bool) -> None:
    """Show what this machine can build and run, and how to get what it lacks."""
    from dataclasses import asdict

    from dgcompile.doctor import diagnose
    from dgcompile.target import Target, list_targets

    diagnosis = diagnose([Target.load(name) for name in ([target] if target else list_targets())])
    if as_json:
        content = asdict(diagnosis)
        for ability, entry in zip(diagnosis.abilities, content["abilities"], strict=True):
            entry |= {"can_build": ability.can_build, "can_run": ability.can_run}
        print_json(content)
    else:
        _show(diagnosis)
    if target and not diagnosis.abilities[0].can_run:
        click.get_current_context().exit(1)


def _show(diagnosis: Diagnosis) -> None:
    from dgcompile.cli.render import console, print_facts, print_table

    gpus = diagnosis.gpus
    driver = f"{gpus.driver_version or 'version unknown'}, CUDA {'.'.join(map(str, gpus.driver_cuda or ()))}"
    cards = [
        f"{card.name}, {format_bytes(card.memory_bytes)}, compute capability {card.compute_capability}"
        for card in gpus.cards
    ]
    print_facts(
        {
            "dgcompile": diagnosis.version,
            "Python": f"{diagnosis.python} on {diagnosis.system}",
            "driver": driver if gpus.driver_cuda else "none",
            "GPUs": "; ".join(cards) or gpus.problem or "none",
        }
    )
    console().print()
    print_table(
        ("packages", "state"),
        [
            (
                extra.name,
                "complete"
                if not extra.bad
                else "; ".join(
                    f"{package.name} {package.installed or 'missing'}, needs {package.wanted or 'any version'}"
                    for package in extra.bad
                ),
            )
            for extra in diagnosis.extras
        ],
    )
    console().print()
    print_table(
        ("target", "machine", "can build", "can run"),
        [
            (
                ability.target,
                ability.title,
                "yes" if ability.can_build else "no",
                "yes" if ability.can_run else "no",
            )
            for ability in diagnosis.abilities
        ],
    )
    for ability in diagnosis.abilities:
        if ability.build_lacks or ability.run_lacks:
            console().print(f"\n{ability.target} lacks:")
        for lack in dict.fromkeys((*ability.build_lacks, *ability.run_lacks)):
            verbs = [
                verb for verb, lacks in (("build", ability.build_lacks), ("run", ability.run_lacks)) if lack in lacks
            ]
            console().print(printable(f"- to {' and '.join(verbs)}: {lack.problem}"))
            if lack.fix:
                console().print(printable(f"  {lack.fix}"))
