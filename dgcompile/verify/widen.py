"""A bfloat16 graph as a float32 one: what it means, for a machine that cannot compute in bfloat16.

onnxruntime's CPU provider has no bfloat16 arithmetic. Every bfloat16 number is a float32 number, so the graph with all
types widened is defined on the same weights, which stay where they are stored: each is cast when it is used. It rounds
in fewer places than the original, which is what makes it a yardstick.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper, numpy_helper

_NARROW, _WIDE = TensorProto.BFLOAT16, TensorProto.FLOAT


def widen(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of ``model`` in which every bfloat16 value is float32.

    Args:
        model: its external data are not loaded; they are referred to as before.
    """
    widened = onnx.ModelProto()
    widened.CopyFrom(model)
    graph = widened.graph
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.tensor_type.elem_type == _NARROW:
            value.type.tensor_type.elem_type = _WIDE
    casts = []
    for initializer in graph.initializer:
        if initializer.data_type != _NARROW:
            continue
        if initializer.data_location == TensorProto.EXTERNAL:
            name = initializer.name
            initializer.name = f"{name}/stored"
            casts.append(helper.make_node("Cast", [initializer.name], [name], name=f"{name}/widened", to=_WIDE))
        else:
            _widen_tensor(initializer)
    _widen_nodes(graph.node)
    for function in widened.functions:
        _widen_nodes(function.node)
    nodes = list(graph.node)
    del graph.node[:]
    graph.node.extend([*casts, *nodes])
    return widened


def _widen_nodes(nodes: Iterable[onnx.NodeProto]) -> None:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.type == AttributeProto.TENSOR:
                _widen_tensor(attribute.t)
            elif attribute.name in ("to", "dtype") and attribute.i == _NARROW:
                attribute.i = _WIDE


def _widen_tensor(tensor: TensorProto) -> None:
    """An inline tensor in place; others than bfloat16 stay as they are."""
    if tensor.data_type == _NARROW:
        values = numpy_helper.to_array(tensor).astype(np.float32)
        tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
