"""The kernels stage of GPU targets: compiles every kernel that a model's two graphs can ask for."""

from __future__ import annotations

from pathlib import Path

from dgcompile.errors import RecipeError, TargetError
from dgcompile.model_spec import ModelSpec
from dgcompile.plugins.block_attention import launch as attention
from dgcompile.plugins.block_attention.tiles import tile_for
from dgcompile.plugins.kernel_library import library_folder
from dgcompile.plugins.launch import Launch
from dgcompile.plugins.moe import launch as moe
from dgcompile.plugins.moe.formats import WeightFormat
from dgcompile.progress import Progress
from dgcompile.recipe import Recipe
from dgcompile.target import Target

ACTIVATIONS = {"bfloat16": "bf16"}
"""dtype of a recipe's activations -> Triton's name of it; kernels compute with nothing else."""


def plan_kernels(spec: ModelSpec, recipe: Recipe, target: Target) -> list[Launch]:
    """Launches, one at least for each kernel that the two graphs of a model can ask for; quick, and needs no Triton.

    Raises:
        TargetError, RecipeError: there are no kernels for this GPU, for a layer's head_dim or for a number format.
    """
    known = sorted({sm for sm, _ in moe.TILES})
    if target.sm not in known:
        raise TargetError(
            f"target {target.name!r} has compute capability {target.compute_capability}, which has no kernels",
            expected=" or ".join(f"{sm / 10}" for sm in known),
        )
    activations = ACTIVATIONS.get(recipe.computes_in)
    if activations is None or recipe.weights.experts.format == "fp32":
        raise RecipeError(
            f"recipe {recipe.name!r} computes in {recipe.activation_dtype} with experts in "
            f"{recipe.weights.experts.text}, which there are no kernels for",
            expected=f"activations in {', '.join(ACTIVATIONS)} and experts in another format than fp32",
        )
    weight_format, group_size = recipe.expert_format
    return [
        *plan_attention(spec, activations, target.sm),
        *plan_experts(spec, activations, target.sm, weight_format, group_size),
    ]


def make_kernels(folder: Path, launches: list[Launch], target: Target, progress: Progress) -> tuple[str, ...]:
    """Compiles kernels for a GPU target into a bundle.

    Args:
        folder: the bundle; the kernels go to ``kernels/sm<SM>/`` in it.
        launches: from :func:`plan_kernels`.
        target: the GPU.
        progress: told of each kernel.

    Returns:
        Names of the files, relative to ``folder``.

    Raises:
        StageError: a kernel does not compile.
    """
    # Triton takes a second to import, and planning does not need it.
    from dgcompile.plugins.build_kernels import build_library

    name = library_folder(target.sm)
    files = build_library(folder / name, launches, target.sm, progress)
    return tuple(f"{name}/{file}" for file in files)


def plan_attention(spec: ModelSpec, activations: str, sm: int) -> list[Launch]:
    """Launches, one at least for each BlockAttention kernel that either graph can ask for: with splits and without."""
    found: dict[str, Launch] = {}
    for layer in spec.layers:
        shape = attention.Shape(1, 1, spec.num_attention_heads, layer.num_key_value_heads, layer.head_dim, 1)
        for causal in (True, False):
            mode = attention.Mode(1.0, layer.window, causal)
            try:
                attention.check(shape, mode)
                tile = tile_for(sm, layer.head_dim)
            except ValueError as problem:
                raise TargetError(f"the model cannot run on compute capability {sm / 10}: {problem}") from problem
            for splits in (1, 2):
                for launch in attention.launches(shape, mode, activations, tile, splits):
                    found.setdefault(launch.key, launch)
    return list(found.values())


def plan_experts(
    spec: ModelSpec,
    activations: str,
    sm: int,
    weight_format: WeightFormat,
    group_size: int,
    int4_scales: str = "fp16",
) -> list[Launch]:
    """Launches, one at least for each MixtureOfExperts kernel that either graph can ask for: both tiles."""
    shape = moe.Shape(1, spec.top_k_experts, spec.num_experts, spec.hidden_size, spec.moe_intermediate_size)
    found: dict[str, Launch] = {}
    for tile in moe.TILES[sm, weight_format]:
        for launch in moe.launches(shape, weight_format, group_size, tile, activations, int4_scales):
            found.setdefault(launch.key, launch)
    return list(found.values())
