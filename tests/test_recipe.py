"""Recipes: classes of weight, formats, and the pairs of recipe and target that cannot be."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from dgcompile.errors import RecipeError
from dgcompile.model_spec import ModelSpec
from dgcompile.recipe import Recipe, WeightFormats, list_recipes, weight_class
from dgcompile.target import Target, list_targets
from tests.tiny_checkpoint import tiny_config

FP32 = Path(__file__).parent.parent / "recipes" / "fp32.yaml"


def test_every_listed_recipe_loads_under_its_own_name() -> None:
    assert list_recipes() == ["bf16", "fp32", "fp8", "int4", "w4a8", "w8a16"]
    assert [Recipe.load(name).name for name in list_recipes()] == list_recipes()
    assert [Recipe.load(name).name for name in list_recipes()] == list_recipes()


def test_fp32_is_float32_throughout() -> None:
    recipe = Recipe.load("fp32")
    assert recipe.activation_dtype == "float32"
    assert {how.text for _, how in recipe.weights.items()} == {"fp32"}
    assert Recipe.load(FP32) == recipe


def test_every_tensor_of_a_model_has_a_class() -> None:
    names = ModelSpec.from_config(tiny_config()).expected_tensors()
    counts = Counter(weight_class(name) for name in names)
    # Two layers, the second without v_proj; per layer 7 norms, 2 q/k norms, 2 scalars; then 2 more norms.
    assert counts == {
        "experts": 4,
        "attention": 7,
        "dense_mlp": 6,
        "self_conditioning": 3,
        "embedding": 1,
        "router": 6,
        "norms": 24,
    }
    assert set(counts) == set(WeightFormats.model_fields)


@pytest.mark.parametrize("name", ["", "lm_head.weight", "model.encoder.vision_tower.norm.weight", "x.mlp.up_proj"])
def test_what_is_no_weight_has_no_class(name: str) -> None:
    with pytest.raises(ValueError, match="no weight class"):
        weight_class(name)


def test_impossible_pairs_are_refused_by_name() -> None:
    recipe = Recipe.load("fp32")
    recipe.check(Target.load("cpu"))
    with pytest.raises(RecipeError, match=r"'fp32' computes in float32, which target 'h100' does not.*bfloat16.*bf16"):
        recipe.check(Target.load("h100"))
    with pytest.raises(RecipeError, match=r"'bf16' computes in bfloat16, which target 'cpu' does not.*float32.*fp32"):
        Recipe.load("bf16").check(Target.load("cpu"))
    int8_only = Target.load("cpu").model_copy(update={"name": "npu", "weight_formats": ("int8",)})
    with pytest.raises(RecipeError, match=r"'fp32' stores experts as fp32, which target 'npu'.*expected one of int8"):
        recipe.check(int8_only)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("  router: fp32\n", "", "weights.router is missing"),
        ("router: fp32", "router: fp31", "weights.router.format is 'fp31'"),
        ("router:", "routers:", "weights.router"),
        ("activation_dtype: float32", "activation_dtype: float64", "activation_dtype is 'float64'"),
        ("title:", "titel:", "unknown key 'titel'"),
        ("name: fp32", "name: ../fp32", "name is '../fp32'"),
    ],
)
def test_bad_files_are_refused_by_file_and_key(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = FP32.read_text()
    assert old in text
    file = tmp_path / "mine.yaml"
    file.write_text(text.replace(old, new))
    with pytest.raises(RecipeError) as raised:
        Recipe.load(str(file))
    assert str(raised.value).startswith(f"{file}: ")
    assert message in str(raised.value)


@pytest.mark.parametrize("target", list_targets())
def test_every_target_runs_its_default_recipe(target: str) -> None:
    found = Target.load(target)
    Recipe.load(found.default_recipe).check(found)


def test_an_unknown_name() -> None:
    with pytest.raises(RecipeError, match="unknown recipe 'fp64'; expected one of bf16, fp32, fp8, int4, w4a8, w8a16, or the path"):
        Recipe.load("fp64")
