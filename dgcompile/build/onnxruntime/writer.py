"""Writing ONNX nodes one after another, as a formula reads."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

MICROSOFT = "com.microsoft"
"""Domain of ONNX Runtime's own operators: https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md."""

_CONTRIBUTED = frozenset({"FusedMatMul", "RotaryEmbedding"})


class Writer:
    """Collects new nodes for a graph; constants become its initializers, equal ones only once.

    Args:
        graph: the main graph, which holds the constants. Bodies of loops see them too.
        prefix: of the nodes' names.
    """

    def __init__(self, graph: ir.Graph, prefix: str) -> None:
        self.nodes: list[ir.Node] = []
        self._graph = graph
        self._prefix = prefix

    def __call__(self, op_type: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        """The only output of a new node."""
        (value,) = self.several(1, op_type, *inputs, **attributes)
        return value

    def several(self, outputs: int, op_type: str, *inputs: ir.Value | None, **attributes: Any) -> Sequence[ir.Value]:
        """The outputs of a new node."""
        domain = MICROSOFT if op_type in _CONTRIBUTED else ""
        name = f"{self._prefix}/{op_type}_{len(self.nodes)}"
        node = ir.node(op_type, list(inputs), attributes=attributes, domain=domain, num_outputs=outputs, name=name)
        for number, value in enumerate(node.outputs):
            value.name = f"{name}.{number}"
        self.nodes.append(node)
        return node.outputs

    def inner(self, prefix: str) -> Writer:
        """A writer of the nodes of a loop's body."""
        return Writer(self._graph, f"{self._prefix}/{prefix}")

    def ints(self, *numbers: int) -> ir.Value:
        """int64 [n]."""
        return self._constant(np.array(numbers, dtype=np.int64))

    def integer(self, number: int) -> ir.Value:
        """int64 scalar."""
        return self._constant(np.array(number, dtype=np.int64))

    def number(self, number: float) -> ir.Value:
        """float32 scalar."""
        return self._constant(np.array(number, dtype=np.float32))

    def ones(self, count: int) -> ir.Value:
        """float32 [count]."""
        return self._constant(np.ones(count, dtype=np.float32))

    def put_before(self, node: ir.Node) -> None:
        """Puts what was written into the graph."""
        self._graph.insert_before(node, self.nodes)

    def _constant(self, array: Any) -> ir.Value:
        content = "_".join(str(number) for number in array.reshape(-1)[:8])
        if array.size > 8:
            content = hashlib.sha256(array.tobytes()).hexdigest()[:16]
        name = f"constant_{array.dtype}_{'x'.join(map(str, array.shape))}_{content}"
        known = self._graph.initializers.get(name)
        if known is not None:
            return known
        tensor = ir.tensor(array, name=name)
        value = ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
        self._graph.register_initializer(value)
        return value


def take_over(old: ir.Value, new: ir.Value) -> None:
    """Makes all that read ``old`` read ``new``, which gets its name, type and shape."""
    new.shape, new.type = old.shape, old.type
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    name, old.name = old.name, None
    new.name = name


def view(graph: ir.Graph, weight: ir.Value, name: str, shape: Sequence[int], first: int = 0) -> ir.Value:
    """A stored weight, or part of it, under another shape: the same bytes in the file, nothing is copied.

    Args:
        graph: which the new initializer belongs to.
        weight: an initializer whose bytes lie in a file.
        name: of the view.
        shape: of the view.
        first: elements of the weight before the view's first one.
    """
    known = graph.initializers.get(name)
    if known is not None:
        return known
    stored = weight.const_value
    assert isinstance(stored, ir.ExternalTensor) and stored.offset is not None
    item = stored.dtype.itemsize
    tensor = ir.ExternalTensor(
        location=stored.location,
        offset=stored.offset + int(first * item),
        length=int(np.prod(shape) * item),
        dtype=stored.dtype,
        shape=ir.Shape(shape),
        name=name,
        base_dir=stored.base_dir,
    )
    value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(stored.dtype), const_value=tensor)
    graph.register_initializer(value)
    return value
