"""The weights of a traced graph: references into the store, and the nodes that turn what lies there into numbers.

Weights stored in another floating dtype than they are computed with are cast where they are used. Dense weights in FP8
or INT4 pass through DequantizeLinear, and where the recipe rounds activations too, the other factor of their product
through QuantizeLinear and DequantizeLinear: engines recognise the three around a MatMul. Experts stay packed, because
their operator takes them as they are.
"""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import onnx_ir as ir

from dgcompile.checkpoint import canonical_name
from dgcompile.errors import TraceError
from dgcompile.quantize.formats import SCALE
from dgcompile.recipe import weight_of
from dgcompile.safetensors_file import StoredTensor
from dgcompile.weights_store import Store, StoredWeight

INLINE_LIMIT = 64 * 1024
"""Largest constant in bytes that may lie in the graph itself; anything larger belongs into the weights store."""

FP8_ZERO = "fp8_zero_point"
"""Constant whose type says that QuantizeLinear makes E4M3 numbers."""

_STORED_DTYPES = {
    "F32": ir.DataType.FLOAT,
    "F16": ir.DataType.FLOAT16,
    "BF16": ir.DataType.BFLOAT16,
    "F8_E4M3": ir.DataType.FLOAT8E4M3FN,
    "I8": ir.DataType.INT8,
    "U8": ir.DataType.UINT8,
}
_FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16})


def take_out_weights(model: ir.Model, store: Store) -> list[ir.Value]:
    """Replaces stored initializers by references into the store, one value per tensor; returns those values.

    Raises:
        TraceError: a weight that the store lacks or holds in another shape.
    """
    references: dict[str, ir.Value] = {}

    def refer(name: str, dtype: ir.DataType | None = None, shape: tuple[int, ...] | None = None) -> ir.Value:
        if name not in references:
            references[name] = _reference(name, store.tensors[name], dtype, shape)
        return references[name]

    for name, value in list(model.graph.initializers.items()):
        canonical = canonical_name(_stored_key(name))
        if canonical not in store.tensors:
            if value.uses():
                tensor = value.const_value
                if tensor is None or tensor.nbytes > INLINE_LIMIT:
                    raise TraceError(f"the traced graph uses {name}, which the weights store does not hold")
            else:
                del model.graph.initializers[name]
            continue
        del model.graph.initializers[name]
        if not value.uses():
            continue
        weight = store.weights[weight_of(canonical)]
        dequantized = value.dtype in _FLOATS and len(weight.parts) > 1 and canonical in store.weights
        expected = weight.shape if dequantized else store.tensors[canonical].shape
        shape = tuple(value.shape or ())
        if shape != expected:
            raise TraceError(f"{canonical} has shape {list(shape)} in the graph", expected=f"{list(expected)}")
        if dequantized:
            replacement = _dequantized(model.graph, weight, value, refer)
        else:
            replacement = refer(canonical)
            if value.dtype != replacement.dtype:
                replacement = _cast(model.graph, replacement, value)
        value.replace_all_uses_with(replacement)
    return list(references.values())


def quantize_activations(model: ir.Model, store: Store) -> list[ir.Value]:
    """Rounds the other factor of products with weights that have a static scale; returns the scales' references.

    Raises:
        TraceError: such a weight is used in another way than in products.
    """
    graph = model.graph
    scales: list[ir.Value] = []
    zero: ir.Value | None = None
    for weight in store.weights.values():
        if weight.input_scale is None:
            continue
        dequantized = next((n for n in graph if n.name == _dequantize_name(weight)), None)
        if dequantized is None:
            continue  # the last layer's in the encoder, which feeds nothing
        scale = _reference(weight.input_scale, store.tensors[weight.input_scale])
        scales.append(scale)
        if zero is None:
            zero = _fp8_zero(graph)
        for product in _products(dequantized.outputs[0]):
            x = product.inputs[0]
            assert x is not None and x.dtype is not None
            # Scales are float32, and the operators want both of their factors alike.
            steps: list[tuple[str, list[ir.Value], dict[str, ir.DataType], ir.DataType]] = [
                ("QuantizeLinear", [scale, zero], {}, ir.DataType.FLOAT8E4M3FN),
                ("DequantizeLinear", [scale, zero], {}, ir.DataType.FLOAT),
            ]
            if x.dtype != ir.DataType.FLOAT:
                steps = [
                    ("Cast", [], {"to": ir.DataType.FLOAT}, ir.DataType.FLOAT),
                    *steps,
                    ("Cast", [], {"to": x.dtype}, x.dtype),
                ]
            value = x
            for number, (operator, more, attributes, dtype) in enumerate(steps):
                name = f"{product.name}/x{number}"
                node = ir.node(operator, [value, *more], attributes=attributes, name=name)
                value = node.outputs[0]
                value.name, value.shape, value.type = name, x.shape, ir.TensorType(dtype)
                graph.insert_before(product, node)
            product.replace_input_with(0, value)
    return scales


def _products(weight: ir.Value) -> list[ir.Node]:
    """The products with a weight [N, K], which is transposed before each."""
    found: list[ir.Node] = []
    for transpose in weight.consumers():
        if transpose.op_type == "Cast":
            found += _products(transpose.outputs[0])
            continue
        for product in transpose.outputs[0].consumers():
            if transpose.op_type != "Transpose" or product.op_type != "MatMul":
                raise TraceError(f"{weight.name} feeds {transpose.op_type} and {product.op_type}", expected="a MatMul")
            found.append(product)
    return found


def _fp8_zero(graph: ir.Graph) -> ir.Value:
    tensor = ir.Tensor(np.zeros((), ml_dtypes.float8_e4m3fn), dtype=ir.DataType.FLOAT8E4M3FN, name=FP8_ZERO)
    value = ir.Value(
        name=FP8_ZERO, shape=ir.Shape(()), type=ir.TensorType(ir.DataType.FLOAT8E4M3FN), const_value=tensor
    )
    graph.register_initializer(value)
    return value


def _dequantized(graph: ir.Graph, weight: StoredWeight, value: ir.Value, refer: Callable[..., ir.Value]) -> ir.Value:
    """The value of a dense weight [N, K], from its codes and scales."""
    codes, scale = weight.parts[""], refer(weight.parts[SCALE])
    if weight.recipe.group_size:
        codes_value = refer(codes, ir.DataType.INT4, weight.shape)
        attributes = {"axis": 1, "block_size": weight.recipe.group_size}
    else:
        codes_value, attributes = refer(codes), {"axis": 0}
    node = ir.node("DequantizeLinear", [codes_value, scale], attributes=attributes, name=_dequantize_name(weight))
    output = node.outputs[0]
    output.name, output.shape, output.type = f"{codes} dequantized", value.shape, scale.type
    replacement = output if scale.dtype == value.dtype else _cast(graph, output, value)
    graph.insert_before(graph[0], node)
    return replacement


def _dequantize_name(weight: StoredWeight) -> str:
    return f"dequantize {weight.parts['']}"


def _cast(graph: ir.Graph, stored: ir.Value, value: ir.Value) -> ir.Value:
    """A weight that is stored in another floating dtype than it is computed with."""
    node = ir.node("Cast", [stored], attributes={"to": value.dtype}, name=f"cast {stored.name}")
    return _made_first(graph, node, f"{stored.name} as {value.dtype}", value)


def _made_first(graph: ir.Graph, node: ir.Node, name: str, like: ir.Value) -> ir.Value:
    """The output of a node that is put before all others, with the type and shape of ``like``."""
    output = node.outputs[0]
    output.name, output.shape, output.type = name, like.shape, like.type
    graph.insert_before(graph[0], node)
    return output


def _reference(
    name: str, stored: StoredTensor, dtype: ir.DataType | None = None, shape: tuple[int, ...] | None = None
) -> ir.Value:
    """An initializer whose bytes lie in the store, with the type and shape that they have to the graph."""
    dtype, axes = dtype or _STORED_DTYPES[stored.dtype], ir.Shape(stored.shape if shape is None else shape)
    place = ir.ExternalTensor(
        location=stored.file.name, offset=stored.offset, length=stored.nbytes, dtype=dtype, shape=axes, name=name
    )
    return ir.Value(name=name, shape=axes, type=ir.TensorType(dtype), const_value=place)


def _stored_key(name: str) -> str:
    """The checkpoint's key of a traced parameter: the names of the modules that wrap it taken off."""
    name = name.replace("self_conditioning.original.", "self_conditioning.")
    if name.startswith("text_model."):  # EncoderGraph
        return "model.encoder.language_model." + name.removeprefix("text_model.")
    return name.removeprefix("model.")  # DenoiserGraph
