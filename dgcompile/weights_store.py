"""The layout of a bundle's ``weights.safetensors``, known before a byte of it is written. No torch.

Both graphs point into this file by offset and length, so tracing needs the layout, not the weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from dgcompile.model_spec import ModelSpec
from dgcompile.quantize.formats import FORMATS, Part
from dgcompile.recipe import Recipe, WeightClass, WeightRecipe, input_scale_of, weight_class
from dgcompile.safetensors_file import DTYPE_BITS, StoredTensor, lay_out

WEIGHTS_FILE = "weights.safetensors"
"""Name of the store in a bundle."""

JOURNAL_FILE = WEIGHTS_FILE + ".journal"
"""Lies beside the store while it is written: which conversion it belongs to, then a line for each tensor on disk."""

_SCALE_DTYPES = {"float32": "F32", "bfloat16": "BF16"}


class StoredWeight(NamedTuple):
    """How one weight of the model lies in the store.

    Attributes:
        shape: of the weight itself.
        recipe: its format, group size and activations.
        parts: names in the store by the suffix that the format gives them; "" is the weight's own name.
        input_scale: name of the static scale of its activations, if it has one.
    """

    shape: tuple[int, ...]
    recipe: WeightRecipe
    parts: dict[str, str]
    input_scale: str | None


def scale_dtype(recipe: Recipe) -> str:
    """Dtype of the scales of groups of dense weights, in safetensors' spelling: that of the activations."""
    return _SCALE_DTYPES[recipe.computes_in]


class Store(NamedTuple):
    """What a store holds, before or after it is written.

    Attributes:
        head: its first bytes: the header, padded.
        weights: every weight of the model by canonical name.
        tensors: where each tensor lies, by name, in the order of their bytes. ``file`` is :data:`WEIGHTS_FILE`,
            relative to the bundle.
    """

    head: bytes
    weights: dict[str, StoredWeight]
    tensors: dict[str, StoredTensor]

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return len(self.head) + sum(tensor.nbytes for tensor in self.tensors.values())


def lay_out_store(spec: ModelSpec, recipe: Recipe) -> Store:
    """The store of a model: the same for equal arguments, on every machine.

    Args:
        spec: the model.
        recipe: the formats, for a target (see :meth:`Recipe.for_target`).
    """
    weights: dict[str, StoredWeight] = {}
    parts: dict[str, Part] = {}
    for name, weight, made in _planned(spec, recipe):
        weights[name] = weight
        parts |= made
    head, tensors = lay_out(Path(WEIGHTS_FILE), parts)
    return Store(head, weights, tensors)


def with_static_scale(spec: ModelSpec, recipe: Recipe) -> list[str]:
    """Names of the weights whose activations have a static scale."""
    return [name for name, weight in lay_out_store(spec, recipe).weights.items() if weight.input_scale is not None]


def _planned(spec: ModelSpec, recipe: Recipe) -> Iterator[tuple[str, StoredWeight, dict[str, Part]]]:
    dense_scales = scale_dtype(recipe)
    for name, shape in spec.expected_tensors().items():
        how = recipe.weights.of(weight_class(name))
        parts = FORMATS[how.format].parts(shape, how.group_size, dense_scales)
        names = {suffix: name + suffix for suffix in parts}
        tensors = {names[suffix]: part for suffix, part in parts.items()}
        input_scale = input_scale_of(name) if how.activations == "fp8_static" else None
        if input_scale is not None:
            tensors[input_scale] = Part("F32", ())
        yield name, StoredWeight(shape, how, names, input_scale), tensors


class ClassSize(NamedTuple):
    """What one class of weight takes in a store.

    Attributes:
        weights: how many there are.
        stored_bytes: of their codes and scales in the file.
        exact_bytes: what the format's bits per weight come to on the model's shapes.
    """

    weights: int
    stored_bytes: int
    exact_bytes: float

    @property
    def bits(self) -> float:
        """Bits that a weight takes, scales included."""
        return 8 * self.stored_bytes / self.weights


def class_sizes(spec: ModelSpec, recipe: Recipe, stored: Mapping[str, StoredTensor]) -> dict[WeightClass, ClassSize]:
    """The size of each class of weight in a store, beside the arithmetic on the model's shapes.

    Args:
        spec: the model.
        recipe: the formats.
        stored: the store's own header, see :func:`dgcompile.safetensors_file.read_header`.
    """
    bits_of_scale = DTYPE_BITS[scale_dtype(recipe)]
    sizes: dict[WeightClass, ClassSize] = {}
    for name, shape in spec.expected_tensors().items():
        kind = weight_class(name)
        how = recipe.weights.of(kind)
        count = math.prod(shape)
        before = sizes.get(kind, ClassSize(0, 0, 0.0))
        exact = count * FORMATS[how.format].bits(shape, how.group_size, bits_of_scale) / 8
        if how.activations == "fp8_static":
            exact += 4
        sizes[kind] = ClassSize(before.weights + count, before.stored_bytes, before.exact_bytes + exact)
    for name, tensor in stored.items():
        kind = weight_class(name)
        sizes[kind] = sizes[kind]._replace(stored_bytes=sizes[kind].stored_bytes + tensor.nbytes)
    return sizes
