"""Recipe: which number format each class of weight is stored in. A YAML file in ``recipes``, or one of the user's."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from dgcompile.config_file import data_file_names, find_data_file, read_yaml
from dgcompile.errors import RecipeError
from dgcompile.model_spec import ModelSpec
from dgcompile.plugins.moe.formats import WeightFormat as ExpertFormat
from dgcompile.quantize.formats import DENSE_GROUPS, EXPERT_BLOCK, EXPERT_GROUPS, FORMATS, SCALE, WeightFormat
from dgcompile.target import Target

ActivationFormat = Literal["none", "fp8_static", "fp8_dynamic"]
ActivationDType = Literal["float32", "bfloat16"]
WeightClass = Literal["experts", "attention", "dense_mlp", "self_conditioning", "embedding", "router", "norms"]

INPUT_SCALE = "input_scale"
"""Last part of the name that the static scale of a weight's activations has in the store, in place of "weight"."""

FORMATS_OF: dict[WeightClass, tuple[WeightFormat, ...]] = {
    "experts": ("fp32", "bf16", "fp8", "int4"),
    "attention": ("fp32", "bf16", "fp8", "int8", "int4"),
    "dense_mlp": ("fp32", "bf16", "fp8", "int8", "int4"),
    # Its output enters every position of every denoising step: never less than 8 bits.
    "self_conditioning": ("fp32", "bf16", "fp8", "int8"),
    # Also the LM head, and what soft embeddings are made of.
    "embedding": ("fp32", "bf16", "fp8"),
    # A millionth of the weights, and a decision that rounding turns over costs a token its experts.
    "router": ("fp32", "bf16"),
    "norms": ("fp32", "bf16"),
}
"""What each class of weight may be stored as."""

# What activations may be rounded to before a product with weights of a format: what engines and kernels multiply.
_ACTIVATIONS_OF: dict[tuple[bool, WeightFormat], tuple[ActivationFormat, ...]] = {
    (True, "int4"): ("none", "fp8_dynamic"),
    (False, "fp8"): ("none", "fp8_static"),
}
DENSE_CLASSES: frozenset[WeightClass] = frozenset({"attention", "dense_mlp", "self_conditioning"})
"""Classes whose weights are matrices of one product each."""

_CLASS_PATTERNS: dict[WeightClass, str] = {
    "embedding": r"model\.decoder\.embed_tokens\.weight",
    "self_conditioning": r"model\.decoder\.self_conditioning\.\w+_proj\.weight",
    "attention": r"model\.decoder\.layers\.\d+\.self_attn\.[qkvo]_proj\.weight",
    "dense_mlp": r"model\.decoder\.layers\.\d+\.mlp\.\w+_proj\.weight",
    "experts": r"model\.decoder\.layers\.\d+\.experts\.(gate_up|down)_proj",
    "router": r"model\.decoder\.layers\.\d+\.router\.(proj\.weight|scale|per_expert_scale)",
    # layer_scalar is no norm, but like them a small factor on the hidden states.
    "norms": r"model\.decoder\.(.+\.)?(\w*_)?(norm|layernorm(_\d)?)\.weight"
    r"|model\.(decoder|encoder\.language_model)\.layers\.\d+\.layer_scalar",
}


def weight_class(name: str) -> WeightClass:
    """Class of a tensor, from its canonical name (see ``ModelSpec.expected_tensors``).

    Raises:
        ValueError: not a tensor of the text model.
    """
    weight = weight_of(name)
    for found, pattern in _CLASS_PATTERNS.items():
        if re.fullmatch(pattern, weight):
            return found
    raise ValueError(f"{name} is in no weight class")


def weight_of(name: str) -> str:
    """Name of the weight that a tensor of the store belongs to: its own, or that of the weight it is a scale of."""
    if name.endswith(f".{INPUT_SCALE}"):
        return name.removesuffix(INPUT_SCALE) + "weight"
    return name.removesuffix(SCALE) if name.endswith((f".weight{SCALE}", f"_proj{SCALE}")) else name


def input_scale_of(weight: str) -> str:
    """Name of the static scale of a dense weight's activations."""
    return weight.removesuffix("weight") + INPUT_SCALE


class WeightRecipe(BaseModel):
    """How one class of weight is stored and multiplied.

    Attributes:
        format: of the weights.
        group_size: weights that share a scale, for ``int4``; else 0.
        activations: what the activations are rounded to before the product: "none", FP8 with one calibrated scale for
            each product ("fp8_static"), or FP8 with a scale for each token ("fp8_dynamic").
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: WeightFormat
    group_size: int = 0
    activations: ActivationFormat = "none"

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, given: Any) -> Any:
        return {"format": given} if isinstance(given, str) else given

    @property
    def text(self) -> str:
        """In a few characters: "int4 g32 fp8_dynamic"."""
        parts: list[str] = [self.format]
        if self.group_size:
            parts.append(f"g{self.group_size}")
        if self.activations != "none":
            parts.append(self.activations)
        return " ".join(parts)


class WeightFormats(BaseModel):
    """Format of each class of weight. Every class must be given: a forgotten one must not get a silent default."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    experts: WeightRecipe
    attention: WeightRecipe
    dense_mlp: WeightRecipe
    self_conditioning: WeightRecipe
    embedding: WeightRecipe
    router: WeightRecipe
    norms: WeightRecipe

    @field_validator("*", mode="after")
    @classmethod
    def _is_possible(cls, given: WeightRecipe, info: ValidationInfo) -> WeightRecipe:
        weight_class: WeightClass = info.field_name  # type: ignore[assignment]  # the fields are the classes
        allowed = FORMATS_OF[weight_class]
        if given.format not in allowed:
            raise ValueError(f"{weight_class} are stored as {' or '.join(allowed)}")
        groups = (
            (EXPERT_GROUPS if weight_class == "experts" else DENSE_GROUPS) if FORMATS[given.format].grouped else (0,)
        )
        if given.group_size not in groups:
            expected = " or ".join(map(str, groups)) if groups != (0,) else "0: only int4 has groups"
            raise ValueError(f"the group_size of {weight_class} in {given.format} must be {expected}")
        key = (weight_class == "experts", given.format)
        activations = _ACTIVATIONS_OF.get(key, ("none",)) if weight_class in {"experts", *DENSE_CLASSES} else ("none",)
        if given.activations not in activations:
            raise ValueError(f"the activations of {weight_class} in {given.format} can be {' or '.join(activations)}")
        return given

    def of(self, weight_class: WeightClass) -> WeightRecipe:
        """How one class is stored."""
        found: WeightRecipe = getattr(self, weight_class)
        return found

    def items(self) -> list[tuple[WeightClass, WeightRecipe]]:
        """Every class with how it is stored."""
        return [(weight_class, self.of(weight_class)) for weight_class in get_args(WeightClass)]


class Recipe(BaseModel):
    """How a model is stored and computed.

    Attributes:
        name: as ``--recipe`` takes it.
        title: what it is, in a few words.
        activation_dtype: dtype of activations and the self-conditioning signal; None, in a file, for the one that the
            target computes in.
        kv_cache: dtype of the KV cache; None, in a file, for that of the activations.
        weights: format per class of weight.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.-]*$")]
    title: Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]{1,100}$")]
    activation_dtype: ActivationDType | None = None
    kv_cache: ActivationDType | None = None
    weights: WeightFormats

    @property
    def computes_in(self) -> ActivationDType:
        """``activation_dtype`` of a recipe that has one, as those have that come from :meth:`for_target`."""
        assert self.activation_dtype is not None, "the recipe is not for a target yet"
        return self.activation_dtype

    @property
    def quantizes(self) -> bool:
        """Whether it stores weights, or multiplies activations, in less than 16 bits."""
        return any(how.format not in ("fp32", "bf16") for _, how in self.weights.items())

    @property
    def needs_calibration(self) -> bool:
        """Whether products have a static scale of their activations."""
        return any(recipe.activations == "fp8_static" for _, recipe in self.weights.items())

    @property
    def expert_format(self) -> tuple[ExpertFormat, int]:
        """``weight_format`` and ``group_size`` of the MixtureOfExperts operator."""
        experts = self.weights.experts
        if experts.format in ("fp32", "bf16"):
            return "float", 0
        if experts.format == "fp8":
            return "fp8", 0
        return ("w4a8" if experts.activations == "fp8_dynamic" else "int4"), experts.group_size

    def for_target(self, target: Target) -> Recipe:
        """The recipe with what the file leaves to the target filled in.

        Raises:
            RecipeError: the target cannot run it, see :meth:`check`.
        """
        dtype = self.activation_dtype or target.activation_dtypes[0]
        filled = {"activation_dtype": dtype, "kv_cache": self.kv_cache or dtype}
        recipe = self.model_copy(update=filled)
        recipe.check(target)
        return recipe

    def keeping_fp8(self, names: Collection[str], spec: ModelSpec) -> Recipe:
        """The recipe for a checkpoint that has some weights in FP8, so that none of these is rounded again.

        A class that it has in FP8 throughout stays so, where the recipe would give it as many bits or more. One that it
        has in FP8 in part only is stored in bfloat16 where the recipe says INT8.

        Args:
            names: canonical names of the weights in FP8.
            spec: the model.
        """
        of_class: dict[WeightClass, set[bool]] = {}
        for name in spec.expected_tensors():
            of_class.setdefault(weight_class(name), set()).add(name in names)
        kept: dict[str, WeightRecipe] = {}
        for weight_class_, how in self.weights.items():
            if of_class[weight_class_] == {True} and how.format in ("fp32", "bf16", "int8"):
                kept[weight_class_] = WeightRecipe(format="fp8")
            elif True in of_class[weight_class_] and how.format == "int8":
                kept[weight_class_] = WeightRecipe(format="bf16")
        return self.model_copy(update={"weights": self.weights.model_copy(update=kept)})

    @classmethod
    def load(cls, source: str | Path) -> Recipe:
        """Loads a recipe by name ("fp32") or from a YAML file.

        Raises:
            RecipeError: no such recipe, or a malformed file; names the file and the key.
        """
        file = find_data_file(source, "recipe", "dgcompile.recipes", error=RecipeError)
        recipe = read_yaml(file, cls, error=RecipeError)
        if recipe.name in list_recipes() and recipe != cls._shipped(recipe.name):
            raise RecipeError(
                f"{file}: name is {recipe.name!r}, which is another recipe that comes with dgcompile",
                expected="a name of its own: bundles and reports show it",
            )
        return recipe

    @classmethod
    def _shipped(cls, name: str) -> Recipe:
        return read_yaml(find_data_file(name, "recipe", "dgcompile.recipes", error=RecipeError), cls, error=RecipeError)

    def check(self, target: Target) -> None:
        """Refuses a target that cannot run this recipe.

        Raises:
            RecipeError: names recipe, target and the class of weight.
        """
        dtype = self.activation_dtype or target.activation_dtypes[0]
        if dtype not in target.activation_dtypes:
            raise RecipeError(
                f"recipe {self.name!r} computes in {dtype}, which target {target.name!r} does not",
                expected=f"one of {', '.join(target.activation_dtypes)}",
                fix=f"--recipe {target.default_recipe}",
            )
        if self.kv_cache not in (None, dtype):
            raise RecipeError(
                f"recipe {self.name!r} keeps the KV cache in {self.kv_cache} and computes in {dtype}",
                expected="the same: no attention kernel converts the cache while it reads",
            )
        for weight_class, recipe in self.weights.items():
            if recipe.format not in target.weight_formats:
                raise RecipeError(
                    f"recipe {self.name!r} stores {weight_class} as {recipe.format}, which target {target.name!r} does "
                    "not run",
                    expected=f"one of {', '.join(target.weight_formats)}",
                )
            if recipe.activations not in ("none", *target.activation_formats):
                raise RecipeError(
                    f"recipe {self.name!r} rounds the activations of {weight_class} to {recipe.activations}, which "
                    f"target {target.name!r} does not run",
                    expected=f"one of {', '.join(('none', *target.activation_formats))}",
                )

    def check_model(self, spec: ModelSpec) -> None:
        """Refuses a model whose shapes do not fit the groups.

        Raises:
            RecipeError: names the class, the tensor and the group sizes that would fit.
        """
        for name, shape in spec.expected_tensors().items():
            weight_class_ = weight_class(name)
            recipe = self.weights.of(weight_class_)
            if not FORMATS[recipe.format].grouped:
                continue
            experts, places = weight_class_ == "experts", shape[-1]
            # The kernels' layout has blocks of EXPERT_BLOCK places, whatever the groups in them.
            groups = () if experts and places % EXPERT_BLOCK else EXPERT_GROUPS if experts else DENSE_GROUPS
            fitting = [size for size in groups if places % size == 0]
            if recipe.group_size not in fitting:
                block = f", nor does {EXPERT_BLOCK}, the block of the kernels' layout" if experts and not groups else ""
                fits = "do not fit" if block else "do not divide"
                raise RecipeError(
                    f"recipe {self.name!r} stores {weight_class_} in groups of {recipe.group_size}, which {fits} the "
                    f"{places} places of {name}{block}",
                    expected=f"a group_size of {' or '.join(map(str, fitting))}" if fitting else "another format",
                    fix="choose another recipe (`dgcompile recipes` lists them), or write one of your own",
                )


def list_recipes() -> list[str]:
    """Names of the recipes that come with dgcompile."""
    return data_file_names("dgcompile.recipes")
