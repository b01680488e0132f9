"""Recipes: classes of weight, formats, and the pairs of recipe and target that cannot be."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import yaml

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
    with pytest.raises(RecipeError, match=r"'fp32' computes in float32, which target 'h100' does not.*bfloat16.*w8a16"):
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
    with pytest.raises(
        RecipeError, match="unknown recipe 'fp64'; expected one of bf16, fp32, fp8, int4, w4a8, w8a16, or the path"
    ):
        Recipe.load("fp64")


# quantized recipes ----------------------------------------------------------------------------------------------------

DENSE_INT4 = """
name: mine
title: mine
weights:
  experts: {format: int4, group_size: 32}
  attention: fp8
  dense_mlp: {format: int4, group_size: 32}
  self_conditioning: fp8
  embedding: bf16
  router: bf16
  norms: bf16
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("router: bf16", "router: fp8", "router are stored as fp32 or bf16"),
        ("norms: bf16", "norms: int4", "norms are stored as fp32 or bf16"),
        ("self_conditioning: fp8", "self_conditioning: {format: int4, group_size: 32}", "fp32 or bf16 or fp8"),
        ("embedding: bf16", "embedding: int4", "embedding are stored as fp32 or bf16 or fp8"),
        ("attention: fp8", "attention: int4", "the group_size of attention in int4 must be 32 or 64 or 128"),
        ("attention: fp8", "attention: {format: fp8, group_size: 32}", "group_size of attention in fp8 must be 0"),
        ("experts: {format: int4, group_size: 32}", "experts: {format: int4, group_size: 128}", "must be 32 or 64"),
        ("attention: fp8", "attention: {format: fp8, activations: fp8_dynamic}", "can be none or fp8_static"),
        ("group_size: 32}", "group_size: 32, activations: fp8_static}", "can be none or fp8_dynamic"),
        ("embedding: bf16", "embedding: {format: fp8, activations: fp8_static}", "embedding in fp8 can be none"),
        ("group_size: 32}", "group_sizes: 32}", "unknown key 'weights.experts.group_sizes'"),
    ],
)
def test_what_a_class_cannot_be_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in DENSE_INT4
    file = tmp_path / "mine.yaml"
    file.write_text(DENSE_INT4.replace(old, new, 1))
    with pytest.raises(RecipeError) as raised:
        Recipe.load(file)
    assert message in str(raised.value)


@pytest.mark.parametrize("name", ["fp8", "w8a16", "int4", "w4a8"])
@pytest.mark.parametrize("target", list_targets())
def test_quantized_recipes_run_everywhere_in_the_targets_own_dtype(name: str, target: str) -> None:
    found = Target.load(target)
    recipe = Recipe.load(name).for_target(found)
    assert recipe.activation_dtype == recipe.kv_cache == found.activation_dtypes[0]


def test_a_cache_in_another_dtype_is_refused() -> None:
    recipe = Recipe.load("int4").model_copy(update={"kv_cache": "bfloat16"})
    recipe.for_target(Target.load("h100"))
    with pytest.raises(RecipeError, match=r"'int4' keeps the KV cache in bfloat16 and computes in float32"):
        recipe.for_target(Target.load("cpu"))


def test_targets_that_lack_a_format_or_a_rounding_are_named() -> None:
    h100 = Target.load("h100")
    with pytest.raises(RecipeError, match=r"'w4a8' rounds the activations of experts to fp8_dynamic, which target"):
        Recipe.load("w4a8").check(h100.model_copy(update={"activation_formats": ("fp8_static",)}))
    with pytest.raises(RecipeError, match=r"'int4' stores attention as int8, which target 'h100' does not run"):
        Recipe.load("int4").check(h100.model_copy(update={"weight_formats": ("bf16", "int4")}))


def spec_of(**sizes: int) -> ModelSpec:
    return ModelSpec.from_config(tiny_config(**{"hidden_size": 64, "intermediate_size": 64, **sizes}))


def test_groups_that_do_not_divide_are_refused_with_those_that_do() -> None:
    published = spec_of(hidden_size=2816, intermediate_size=2112, moe_intermediate_size=704)
    for name in list_recipes():
        Recipe.load(name).check_model(published)
    dense = "dense_mlp: {format: int4, group_size: 128}"
    text = DENSE_INT4.replace("dense_mlp: {format: int4, group_size: 32}", dense)
    with pytest.raises(RecipeError, match=r"dense_mlp in groups of 128.* the 2112 places of .*expected.* 32 or 64"):
        Recipe.model_validate(yaml.safe_load(text)).check_model(published)
    mine = Recipe.model_validate(yaml.safe_load(DENSE_INT4))
    with pytest.raises(
        RecipeError, match=r"experts in groups of 32.* 40 places of .*down_proj.*; expected another format"
    ):
        mine.check_model(spec_of(moe_intermediate_size=40))
    with pytest.raises(
        RecipeError, match=r"experts in groups of 32.*fit the 96 places of .*nor does 64.*expected another"
    ):
        mine.check_model(spec_of(moe_intermediate_size=96))
    with pytest.raises(
        RecipeError, match=r"experts in groups of 64.*fit the 96 places of .*nor does 64.*expected another"
    ):
        Recipe.load("int4").check_model(spec_of(moe_intermediate_size=96))


def test_what_a_checkpoint_has_in_fp8_stays_so() -> None:
    spec = spec_of()
    attention = {name for name in spec.expected_tensors() if weight_class(name) == "attention"}
    recipe = Recipe.load("bf16")
    assert recipe.keeping_fp8(attention, spec).weights.attention.text == "fp8"
    assert recipe.keeping_fp8(attention, spec).weights.dense_mlp == recipe.weights.dense_mlp
    # One that is not in FP8, and the class is as the recipe says, or in no format that rounds FP8 again.
    part = attention - {min(attention)}
    assert recipe.keeping_fp8(part, spec) == recipe
    assert Recipe.load("w8a16").keeping_fp8(attention, spec).weights.attention.text == "fp8"
    assert Recipe.load("w8a16").keeping_fp8(part, spec).weights.attention.text == "bf16"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("name: 2026-13-45", "holds a value that its YAML type does not allow"),
        ("name: !!int abc", "holds a value that its YAML type does not allow"),
        ("name: !!int ''", "holds a value that its YAML type does not allow"),
        ("name: !!bool foo", "holds a value that its YAML type does not allow"),
        ("name: !!timestamp foo", "holds a value that its YAML type does not allow"),
        ("name: " + "9" * 6000, "holds a value that its YAML type does not allow"),
        ("name: &a mine\ntitle: *a", "aliases (*name) are not read"),
        ("name: int4", "name is 'int4', which is another recipe that comes with dgcompile"),
        ("name: [" + "[" * 5 + "1, " * 5000 + "]" * 6, "name is"),
    ],
)
def test_values_that_no_recipe_has(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        DENSE_INT4.replace("name: mine", line).replace("title: mine", "" if "title" in line else "title: t")
    )
    with pytest.raises(RecipeError) as raised:
        Recipe.load(file)
    assert message in str(raised.value)
    assert len(str(raised.value)) < 400


def test_a_copy_of_a_shipped_recipe_is_that_recipe(tmp_path: Path) -> None:
    copy = tmp_path / "copy.yaml"
    copy.write_bytes((FP32.parent / "int4.yaml").read_bytes())
    assert Recipe.load(copy) == Recipe.load("int4")
