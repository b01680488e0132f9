"""``dgcompile recipes``: in which number formats a model can be stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dgcompile.cli.command import Command, json_option
from dgcompile.cli.text import print_json

if TYPE_CHECKING:
    from dgcompile.recipe import Recipe
    from dgcompile.target import Target


@click.command(
    "recipes",
    cls=Command,
    examples=[("recipes", "A table"), ("recipes --json | jq '.[].weights'", "The format of each class of weight")],
)
@json_option
def command(as_json: bool) -> None:
    """List the recipes: which number format each class of weight is stored in.

    A recipe is a YAML file; `dgcompile build --recipe FILE.yaml` takes one of your own.
    """
    from dgcompile.recipe import Recipe, list_recipes
    from dgcompile.target import Target, list_targets

    targets = [Target.load(name) for name in list_targets()]
    recipes = {recipe: _targets_of(recipe, targets) for recipe in map(Recipe.load, list_recipes())}
    if as_json:
        print_json([{**recipe.model_dump(mode="json"), "targets": names} for recipe, names in recipes.items()])
        return
    from dgcompile.cli.render import print_table

    print_table(
        ("recipe", "meaning", "experts", "other weights", "activations", "targets"),
        [
            (
                recipe.name,
                recipe.title,
                recipe.weights.experts.text,
                ", ".join(sorted({other.text for name, other in recipe.weights.items() if name != "experts"})),
                recipe.activation_dtype or "the target's",
                ", ".join(names) or "none",
            )
            for recipe, names in recipes.items()
        ],
    )


def _targets_of(recipe: Recipe, targets: list[Target]) -> list[str]:
    """Names of the targets that can run ``recipe``."""
    from dgcompile.errors import RecipeError

    names = []
    for target in targets:
        try:
            recipe.check(target)
        except RecipeError:
            continue
        names.append(target.name)
    return names
