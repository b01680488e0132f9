"""RMS norms as single nodes: five or six nodes each in the traced graph, and each a pass over the hidden states."""

from __future__ import annotations

import onnx_ir as ir

from dgcompile.build.onnxruntime.matching import is_number, made_by, number_of
from dgcompile.build.onnxruntime.writer import Writer, take_over


def fuse_norms(graph: ir.Graph) -> int:
    """Replaces ``x * (mean(x^2) + eps)^-0.5 [* weight]`` over the last axis by SimplifiedLayerNormalization.

    A norm that is multiplied by several weights becomes one node for each of them.

    Returns:
        how many norms there were.
    """
    found = 0
    for node in list(graph):
        epsilon = _epsilon(node)
        if epsilon is None:
            continue
        x, normed = node.inputs[0], node.outputs[0]
        assert x is not None and x.shape is not None
        found += 1
        for user in list(normed.consumers()):
            weight = _weight(user, normed)
            if weight is not None:
                _replace(graph, user, x, weight, epsilon)
        if normed.uses() or normed.is_graph_output():
            width = x.shape[-1]
            assert isinstance(width, int)
            _replace(graph, node, x, Writer(graph, "").ones(width), epsilon)
    return found


def _replace(graph: ir.Graph, node: ir.Node, x: ir.Value, weight: ir.Value, epsilon: float) -> None:
    write = Writer(graph, f"{node.name}/norm")
    fused = write("SimplifiedLayerNormalization", x, weight, axis=-1, epsilon=epsilon, stash_type=1)
    write.put_before(node)
    take_over(node.outputs[0], fused)


def _epsilon(node: ir.Node) -> float | None:
    """Epsilon of the norm whose last node this is; None for any other node."""
    if node.op_type != "Mul" or len(node.inputs) != 2:
        return None
    x, root = node.inputs
    power = made_by(root, "Pow")
    if power is None or not is_number(power.inputs[1], -0.5):
        return None
    added = made_by(power.inputs[0], "Add")
    mean = None if added is None else made_by(added.inputs[0], "ReduceMean")
    square = None if mean is None else made_by(mean.inputs[0], "Pow")
    if added is None or mean is None or square is None:
        return None
    last_axis = is_number(mean.inputs[1], -1)
    return (
        number_of(added.inputs[1]) if square.inputs[0] is x and is_number(square.inputs[1], 2) and last_axis else None
    )


def _weight(node: ir.Node, normed: ir.Value) -> ir.Value | None:
    """The weight [H] that this node multiplies a norm with."""
    if node.op_type != "Mul":
        return None
    weight = next((value for value in node.inputs if value is not normed), None)
    if weight is None or weight.shape is None or len(weight.shape) != 1 or normed.shape is None:
        return None
    return weight if weight.shape[0] == normed.shape[-1] else None
