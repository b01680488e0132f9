"""What the weights of a bundle take, by class."""

from __future__ import annotations

import math
from typing import get_args

from dgcompile.bundle import Bundle
from dgcompile.errors import BundleError
from dgcompile.evaluate.report import ClassBytes
from dgcompile.recipe import WeightClass, weight_class
from dgcompile.safetensors_file import read_header


def class_bytes(bundle: Bundle) -> tuple[ClassBytes, ...]:
    """Bytes of each class of weight in the bundle's store, the scales with what they belong to.

    Raises:
        BundleError: the store cannot be read, or has a tensor that is none of the model's.
    """
    weights: dict[WeightClass, int] = dict.fromkeys(get_args(WeightClass), 0)
    stored = dict(weights)
    for name, shape in bundle.spec.expected_tensors().items():
        weights[weight_class(name)] += math.prod(shape)
    for name, tensor in read_header(bundle.weights_file, error=BundleError).items():
        try:
            stored[weight_class(name)] += tensor.nbytes
        except ValueError as error:
            raise BundleError(f"{bundle.weights_file}: {error}", fix="build the bundle again") from error
    return tuple(
        ClassBytes(weight_class=found, weights=count, stored_bytes=stored[found]) for found, count in weights.items()
    )
