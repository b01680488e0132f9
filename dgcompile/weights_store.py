"""The layout of a bundle's ``weights.safetensors``, known before a byte of it is written. No torch.

Both graphs point into this file by offset and length, so tracing needs the layout, not the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dgcompile.model_spec import ModelSpec
from dgcompile.recipe import Recipe, WeightFormat, weight_class
from dgcompile.safetensors_file import StoredTensor, lay_out

WEIGHTS_FILE = "weights.safetensors"
"""Name of the store in a bundle."""

JOURNAL_FILE = WEIGHTS_FILE + ".journal"
"""Lies beside the store while it is written: which conversion it belongs to, then a line for each tensor on disk."""

STORED_DTYPE: dict[WeightFormat, str] = {"fp32": "F32", "bf16": "BF16"}
"""Dtype of a weight in the store, per format, in safetensors' spelling."""


def plan_store(spec: ModelSpec, recipe: Recipe) -> dict[str, StoredTensor]:
    """Where each tensor of the model lies in the store.

    Args:
        spec: the model.
        recipe: the formats.

    Returns:
        By canonical name, in the order of their bytes: dtype, shape, absolute offset and length. ``file`` is
        :data:`WEIGHTS_FILE`, relative to the bundle. The same for equal arguments, on every machine.
    """
    return store_layout(spec, recipe)[1]


def store_layout(spec: ModelSpec, recipe: Recipe) -> tuple[bytes, dict[str, StoredTensor]]:
    """The first bytes of the store (its header, padded) and :func:`plan_store`'s answer."""
    return lay_out(Path(WEIGHTS_FILE), dict(_packed_tensors(spec, recipe)))


def _packed_tensors(spec: ModelSpec, recipe: Recipe) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
    for name, shape in spec.expected_tensors().items():
        yield name, (STORED_DTYPE[recipe.weights.of(weight_class(name))], shape)
