"""Recipe: which number format each class of weight is stored in. A YAML file in ``recipes``, or one of the user's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from dgcompile.config_file import data_file_names, find_data_file, read_yaml
from dgcompile.errors import RecipeError
from dgcompile.target import Target

WeightFormat = Literal["fp32", "bf16"]
ActivationDType = Literal["float32", "bfloat16"]
WeightClass = Literal["experts", "attention", "dense_mlp", "self_conditioning", "embedding", "router", "norms"]

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
    for found, pattern in _CLASS_PATTERNS.items():
        if re.fullmatch(pattern, name):
            return found
    raise ValueError(f"{name} is in no weight class")


class WeightFormats(BaseModel):
    """Format of each class of weight. Every class must be given: a forgotten one must not get a silent default."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    experts: WeightFormat
    attention: WeightFormat
    dense_mlp: WeightFormat
    self_conditioning: WeightFormat
    embedding: WeightFormat
    router: WeightFormat
    norms: WeightFormat

    def of(self, weight_class: WeightClass) -> WeightFormat:
        """Format of one class."""
        formats: dict[str, WeightFormat] = self.model_dump()
        return formats[weight_class]


class Recipe(BaseModel):
    """How a model is stored and computed.

    Attributes:
        name: as ``--recipe`` takes it.
        title: what it is, in a few words.
        activation_dtype: dtype of activations, KV cache and the self-conditioning signal.
        weights: format per class of weight.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.-]*$")]
    title: Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]{1,100}$")]
    activation_dtype: ActivationDType
    weights: WeightFormats

    @classmethod
    def load(cls, source: str | Path) -> Recipe:
        """Loads a recipe by name ("fp32") or from a YAML file.

        Raises:
            RecipeError: no such recipe, or a malformed file; names the file and the key.
        """
        file = find_data_file(source, "recipe", "dgcompile.recipes", error=RecipeError)
        return read_yaml(file, cls, error=RecipeError)

    def check(self, target: Target) -> None:
        """Refuses a target that cannot run this recipe.

        Raises:
            RecipeError: names recipe, target and the class of weight.
        """
        if self.activation_dtype not in target.activation_dtypes:
            raise RecipeError(
                f"recipe {self.name!r} computes in {self.activation_dtype}, which target {target.name!r} does not",
                expected=f"one of {', '.join(target.activation_dtypes)}",
                fix=f"--recipe {target.default_recipe}",
            )
        for weight_class, weight_format in self.weights:
            if weight_format not in target.weight_formats:
                raise RecipeError(
                    f"recipe {self.name!r} stores {weight_class} as {weight_format}, which target {target.name!r} does "
                    "not run",
                    expected=f"one of {', '.join(target.weight_formats)}",
                )


def list_recipes() -> list[str]:
    """Names of the recipes that come with dgcompile."""
    return data_file_names("dgcompile.recipes")
