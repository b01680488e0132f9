"""Workloads for the tests of plans."""

from __future__ import annotations

from typing import Any

from dgcompile.model_spec import ModelSpec
from dgcompile.plan import BuildPlan, Workload, make_plan
from dgcompile.recipe import Recipe
from dgcompile.target import Target


def workload(spec: ModelSpec, target: str | Target, recipe: str | Recipe, context: int, batch: int = 1) -> Workload:
    """A workload of shipped or other targets and recipes."""
    target = Target.load(target) if isinstance(target, str) else target
    recipe = Recipe.load(recipe) if isinstance(recipe, str) else recipe
    return Workload(spec, recipe.for_target(target), target, context, batch)


def plan(spec: ModelSpec, target: str | Target, recipe: str | Recipe, context: int, batch: int = 1) -> BuildPlan:
    """Its plan."""
    return make_plan(workload(spec, target, recipe, context, batch))


def recipe_of(**formats: Any) -> Recipe:
    """A recipe with bfloat16 where ``formats`` does not say otherwise."""
    kinds = ("experts", "attention", "dense_mlp", "self_conditioning", "embedding", "router", "norms")
    weights = {kind: formats.get(kind, "bf16") for kind in kinds}
    return Recipe.model_validate({"name": "uniform", "title": "A test's own", "weights": weights})
