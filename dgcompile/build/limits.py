"""The limits that a bundle is built for: tokens of a row, rows of a call."""

from __future__ import annotations

from dgcompile.bundle import MAX_BATCH
from dgcompile.errors import InputError
from dgcompile.model_spec import ModelSpec
from dgcompile.target import Target

DEFAULT_MAX_CONTEXT = 8192
"""Default of ``max_context`` where the model allows as much: 2.5 GB of float32 cache per row at the published size."""


def resolve_max_batch(target: Target, requested: int | None) -> int | None:
    """``max_batch`` of a bundle: ``requested`` or 1 on a GPU, None (any number) on the CPU.

    Raises:
        InputError: out of range, or given for a target whose engines take any number of rows.
    """
    if target.backend == "onnxruntime":
        if requested is not None:
            raise InputError(f"max_batch was given for target {target.name}, whose graphs take any number of rows")
        return None
    if requested is not None and not 1 <= requested <= MAX_BATCH:
        raise InputError(f"max_batch is {requested}", expected=f"1 to {MAX_BATCH}")
    return requested or 1


def resolve_max_context(spec: ModelSpec, requested: int | None) -> int:
    """``max_context`` of a bundle: ``requested``, or the model's own limit up to :data:`DEFAULT_MAX_CONTEXT`.

    It bounds the cache of the full-attention layers, and so memory. It must leave room for one prompt token and one
    canvas. The cpu target's graphs do not depend on it.

    Raises:
        InputError: out of range; names the range.
    """
    smallest, largest = spec.canvas_length + 1, spec.max_position_embeddings
    if largest < smallest:
        raise InputError(
            f"the checkpoint's max_position_embeddings is {largest} and its canvas_length {spec.canvas_length}",
            expected="room for at least one prompt token and one canvas",
        )
    if requested is None:
        return min(largest, max(DEFAULT_MAX_CONTEXT, smallest))
    if not smallest <= requested <= largest:
        raise InputError(
            f"max_context is {requested}",
            expected=f"{smallest} (one prompt token and one canvas) to {largest} (the model's max_position_embeddings)",
        )
    return requested
