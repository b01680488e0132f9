"""Dense weights as inputs of an engine, so that both engines read one copy of them in device memory.

A dense weight [N, K] reaches its product as ``MatMul(x, Transpose(W))``, through DequantizeLinear where it is stored in
INT8 or E4M3. Weights that multiply the same ``x`` (query, key and value projections; gate and up) become one input and
one product, whose result is split: one large product keeps a GPU busy where three small ones do not.

How the input lies in memory follows what TensorRT-RTX 1.7 reads without a copy, as its lists of layers show:

* Codes that are unpacked inside the product (INT8, E4M3 beside activations that are not rounded): [1, K, N], transposed
  when they are loaded. Given as [1, N, K], the whole matrix would be transposed in every call.
* All others ([1, N, K], as they are stored): the transposition is taken into the product. E4M3 tensor cores want just
  this layout.

In both, the leading axis of length one matters: without it, the builder copies the matrix to one that has it.
INT4 stays a constant of each engine: its two codes a byte can be packed along K only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from dgcompile.engine_table import EngineDType, EngineTensor

_CODES: Mapping[int, EngineDType] = {
    onnx.TensorProto.INT8: "int8",
    onnx.TensorProto.FLOAT8E4M3FN: "float8e4m3fn",
}
_FLOATS: Mapping[int, EngineDType] = {
    onnx.TensorProto.FLOAT: "float32",
    onnx.TensorProto.FLOAT16: "float16",
    onnx.TensorProto.BFLOAT16: "bfloat16",
}


@dataclass(frozen=True)
class _Product:
    """One ``MatMul(x, Transpose([Cast] [DequantizeLinear] weight))``.

    Attributes:
        node: the MatMul.
        weight: the stored matrix [N, K].
        dequantize: what makes numbers of codes; None for a weight that is stored as numbers.
        cast: to the product's dtype; None where the numbers have it.
        rounded: whether the other factor is rounded to E4M3 before it.
    """

    node: onnx.NodeProto
    weight: onnx.TensorProto
    dequantize: onnx.NodeProto | None
    cast: onnx.NodeProto | None
    rounded: bool

    @property
    def transposed(self) -> bool:
        """Whether it is loaded as [K, N]; see the module's head."""
        return self.dequantize is not None and not self.rounded

    @property
    def kind(self) -> tuple[object, ...]:
        """What weights must have in common to be multiplied together."""
        to = None if self.cast is None else helper.get_attribute_value(self.cast.attribute[0])
        return (self.node.input[0], self.weight.data_type, self.weight.dims[1], to, self.rounded)


def lift_dense(graph: onnx.GraphProto) -> dict[str, EngineTensor]:
    """Makes dense weights inputs of the graph, in place.

    Args:
        graph: a traced graph, with weights as external data.

    Returns:
        the inputs that were added, by name.
    """
    groups: dict[tuple[object, ...], list[_Product]] = {}
    for product in _products(graph):
        groups.setdefault(product.kind, []).append(product)
    made: dict[str, EngineTensor] = {}
    gone: set[str] = set()  # outputs of nodes that are replaced
    replaced: dict[str, list[onnx.NodeProto]] = {}  # by the output of a group's first product
    for products in groups.values():
        tensor, nodes = _together(graph, products)
        made[tensor.name] = tensor
        gone.update(product.node.output[0] for product in products)
        replaced[products[0].node.output[0]] = nodes
    nodes = []
    for node in graph.node:
        nodes += replaced.get(node.output[0], [] if node.output[0] in gone else [node])
    del graph.node[:]
    graph.node.extend(_used(nodes, graph))
    read = {name for node in graph.node for name in node.input} - set(made)
    kept = [tensor for tensor in graph.initializer if tensor.name in read]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    return made


def _products(graph: onnx.GraphProto) -> list[_Product]:
    """The products whose weight can be an input: of a matrix that nothing else reads."""
    makers = {output: node for node in graph.node for output in node.output}
    weights = {
        tensor.name: tensor
        for tensor in graph.initializer
        if tensor.data_location == onnx.TensorProto.EXTERNAL and len(tensor.dims) == 2
    }
    readers: dict[str, int] = {}
    for node in graph.node:
        for name in node.input:
            readers[name] = readers.get(name, 0) + 1
    found = []
    for node in graph.node:
        transpose = makers.get(node.input[1]) if node.op_type == "MatMul" else None
        if transpose is None or transpose.op_type != "Transpose":
            continue
        path, name = [transpose], transpose.input[0]
        cast = dequantize = None
        if name in makers and makers[name].op_type == "Cast":
            cast = makers[name]
            path, name = [*path, cast], cast.input[0]
        if name in makers and makers[name].op_type == "DequantizeLinear":
            dequantize = makers[name]
            path, name = [*path, dequantize], dequantize.input[0]
        weight = weights.get(name)
        if weight is None or readers[name] != 1 or any(readers[step.output[0]] != 1 for step in path):
            continue
        if weight.data_type not in (_FLOATS if dequantize is None else _CODES):
            continue
        rounded = _is_rounded(node.input[0], makers)
        found.append(_Product(node, weight, dequantize, cast, rounded))
    return found


def _is_rounded(name: str, makers: Mapping[str, onnx.NodeProto]) -> bool:
    """Whether a value comes out of QuantizeLinear and DequantizeLinear."""
    maker = makers.get(name)
    if maker is not None and maker.op_type == "Cast":
        maker = makers.get(maker.input[0])
    return maker is not None and maker.op_type == "DequantizeLinear"


def _together(graph: onnx.GraphProto, products: list[_Product]) -> tuple[EngineTensor, list[onnx.NodeProto]]:
    """One product for several of a kind: its weight as an input, and the nodes that replace theirs."""
    first = products[0]
    rows, width = [product.weight.dims[0] for product in products], first.weight.dims[1]
    name = _joined([product.weight.name for product in products])
    shape = (1, width, sum(rows)) if first.transposed else (1, sum(rows), width)
    dtype = (_CODES if first.dequantize is not None else _FLOATS)[first.weight.data_type]
    tensor = EngineTensor(
        name=name,
        mode="input",
        dtype=dtype,
        shape=shape,
        parts=tuple(product.weight.name for product in products),
        transposed=first.transposed,
    )
    graph.input.append(helper.make_tensor_value_info(name, first.weight.data_type, shape))

    nodes: list[onnx.NodeProto] = []

    def add(operator: str, inputs: list[str], suffix: str, outputs: list[str] | None = None, **attributes: Any) -> str:
        made = outputs or [f"{name}/{suffix}"]
        nodes.append(helper.make_node(operator, inputs, made, name=f"{name}/{suffix}", **attributes))
        return made[0]

    def constant(suffix: str, values: list[int]) -> str:
        graph.initializer.append(numpy_helper.from_array(np.array(values, dtype=np.int64), f"{name}/{suffix}"))
        return f"{name}/{suffix}"

    value = name
    if first.dequantize is not None:
        scales = [product.dequantize.input[1] for product in products if product.dequantize is not None]
        scale = scales[0] if len(scales) == 1 else add("Concat", scales, "scale", axis=0)
        value = add("DequantizeLinear", [value, scale], "dequantized", axis=2 if first.transposed else 1)
    if first.cast is not None:
        value = add("Cast", [value], "cast", to=helper.get_attribute_value(first.cast.attribute[0]))
    if not first.transposed:
        value = add("Transpose", [value], "transposed", perm=[0, 2, 1])
    # All tokens as rows of one product, which reads the weight once for all rows of a batch.
    x = first.node.input[0]
    tokens = add("Reshape", [x, constant("together", [1, -1, width])], "x")
    product = add("MatMul", [tokens, value], "product")
    leading = add("Shape", [x], "leading", start=0, end=2)
    apart = add("Concat", [leading, constant("rows", [sum(rows)])], "apart", axis=0)
    outputs = [product.node.output[0] for product in products]
    if len(products) == 1:
        add("Reshape", [product, apart], "result", outputs)
    else:
        result = add("Reshape", [product, apart], "result")
        add("Split", [result, constant("split", rows)], "parts", outputs, axis=2)
    return tensor, nodes


def _joined(names: list[str]) -> str:
    """``a.q_proj.weight`` and ``a.k_proj.weight`` as ``a.q_proj+k_proj.weight``."""
    if len(names) == 1:
        return names[0]
    split = [name.rsplit(".", 2) for name in names]
    return f"{split[0][0]}.{'+'.join(middle for _, middle, _ in split)}.{split[0][2]}"


def _used(nodes: list[onnx.NodeProto], graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """The nodes without those that only served what was replaced, in an order in which all can run."""
    needed = {value.name for value in graph.output}
    kept: list[onnx.NodeProto] = []
    for node in reversed(nodes):
        if needed.intersection(node.output):
            needed.update(node.input)
            kept.append(node)
    return kept[::-1]
