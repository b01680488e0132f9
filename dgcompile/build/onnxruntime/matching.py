"""Looking backwards through a graph: which node made a value, and what constants it is made of."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

LARGEST_CONSTANT = 64
"""Elements that a constant may have to be looked into; weights are never read."""


def made_by(value: ir.Value | None, *op_types: str) -> ir.Node | None:
    """The node that made a value, if it is of one of these kinds."""
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type in op_types else None


def constant(value: ir.Value | None) -> np.ndarray | None:
    """What a small constant holds; None for anything else."""
    if value is None:
        return None
    if value.const_value is None:
        return None
    if value.const_value.size > LARGEST_CONSTANT or isinstance(value.const_value, ir.ExternalTensor):
        return None
    return value.const_value.numpy()


def is_number(value: ir.Value | None, number: float) -> bool:
    """Whether a value is the constant ``number``."""
    found = constant(value)
    return found is not None and found.size == 1 and bool(found.reshape(-1)[0] == np.float32(number))


def number_of(value: ir.Value | None) -> float | None:
    """The only element of a constant; None for anything else."""
    found = constant(value)
    return float(found.reshape(-1)[0]) if found is not None and found.size == 1 else None
