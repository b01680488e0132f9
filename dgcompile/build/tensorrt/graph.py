"""From a traced graph to what TensorRT parses, and to the table of the engine's tensors.

Two things change. The bodies of the custom operators go, because TensorRT's parser would prefer them to the plugins
without a word. And the weights become inputs, so that both engines are given the same device memory and none stores
them. What stays are norms, routers, scales, and dense weights of a format that cannot be an input.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import onnx

from dgcompile.build.tensorrt.dense import lift_dense
from dgcompile.contract import ONNX_DOMAIN, GraphName, TensorSpec, graph_inputs, graph_outputs
from dgcompile.engine_table import TABLES, EngineDType, EngineTable, EngineTensor, Profile
from dgcompile.errors import EngineError
from dgcompile.model_spec import ModelSpec
from dgcompile.recipe import ActivationDType, weight_class
from dgcompile.runtime.loop import ENCODE_CHUNK

_ENGINE_DTYPES: Mapping[int, EngineDType] = {
    onnx.TensorProto.FLOAT: "float32",
    onnx.TensorProto.FLOAT16: "float16",
    onnx.TensorProto.BFLOAT16: "bfloat16",
    onnx.TensorProto.FLOAT8E4M3FN: "float8e4m3fn",
    onnx.TensorProto.UINT8: "int8",  # TensorRT has no uint8 inputs; plugins read the bytes as they are
    onnx.TensorProto.INT8: "int8",
}


def engine_graph(path: Path) -> tuple[onnx.ModelProto, dict[str, EngineTensor]]:
    """Reads a traced graph, without its weights, and makes it the builder's.

    Args:
        path: the graph; external data are looked for beside it, by whoever reads them.

    Returns:
        the model, and the weights that became inputs, by name.

    Raises:
        EngineError: the graph has no custom operator, or a weight of a dtype that no engine input can have.
    """
    model = onnx.load(str(path), load_external_data=False)
    del model.functions[:]
    if not any(node.domain == ONNX_DOMAIN for node in model.graph.node):
        raise EngineError(f"{path.name} has no operator of the domain {ONNX_DOMAIN}", fix="build the bundle again")
    lifted: dict[str, EngineTensor] = {}
    kept = []
    for initializer in model.graph.initializer:
        if not _is_lifted(initializer):
            kept.append(initializer)
            continue
        dtype = _ENGINE_DTYPES.get(initializer.data_type)
        if dtype is None:
            name = onnx.TensorProto.DataType.Name(initializer.data_type)
            raise EngineError(f"{path.name}: {initializer.name} is {name}", expected="a dtype that an engine can take")
        given = onnx.TensorProto.INT8 if dtype == "int8" else initializer.data_type
        model.graph.input.append(onnx.helper.make_tensor_value_info(initializer.name, given, initializer.dims))
        lifted[initializer.name] = EngineTensor(
            name=initializer.name,
            mode="input",
            dtype=dtype,
            shape=tuple(initializer.dims),
            parts=(initializer.name,),
        )
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    _multiply_untransposed(model.graph, lifted)
    return model, {**lifted, **lift_dense(model.graph)}


def _multiply_untransposed(graph: onnx.GraphProto, lifted: Mapping[str, EngineTensor]) -> None:
    """Rewrites products with a transposed input table, so that the builder reads the table as it lies.

    It would run ``MatMul(x, Transpose(table))`` as a copy of the whole table in every call: 1.5 GB read and written for
    the published embedding. Given one axis more, it takes the transposition into the product instead (seen in the layer
    lists of TensorRT-RTX 1.7; neither Gemm nor Einsum avoids the copy). All tokens become rows of one product, which
    reads the table once for all rows of a batch.
    """
    makers = {output: node for node in graph.node for output in node.output}
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        maker = makers.get(node.input[1]) if node.op_type == "MatMul" else None
        if maker is None or maker.op_type != "Transpose" or maker.input[0] not in lifted:
            nodes.append(node)
            continue
        table, (x, product) = maker.input[0], (node.input[0], node.output[0])
        rows, width = (int(axis) for axis in lifted[table].shape)
        tokens = _last_but_one(graph, x, product)
        constants: dict[str, list[int]] = {"axis": [0], "together": [1, -1, width], "apart": [-1, tokens, rows]}
        for name, values in constants.items():
            graph.initializer.append(
                onnx.helper.make_tensor(f"{node.name}/{name}", onnx.TensorProto.INT64, [len(values)], values)
            )
        steps: tuple[tuple[str, list[str], str, dict[str, list[int]]], ...] = (
            ("Unsqueeze", [table, f"{node.name}/axis"], f"{node.name}/table", {}),
            ("Transpose", [f"{node.name}/table"], f"{node.name}/transposed", {"perm": [0, 2, 1]}),
            ("Reshape", [x, f"{node.name}/together"], f"{node.name}/x", {}),
            ("MatMul", [f"{node.name}/x", f"{node.name}/transposed"], f"{node.name}/product", {}),
            ("Reshape", [f"{node.name}/product", f"{node.name}/apart"], product, {}),
        )
        for operator, inputs, output, attributes in steps:
            name = node.name if operator == "MatMul" else f"{node.name}/{output}"
            nodes.append(_node(operator, inputs, output, name, attributes))
    used = {name for node in nodes for name in node.input}
    del graph.node[:]
    graph.node.extend(
        node
        for node in nodes
        if not (node.op_type == "Transpose" and node.input[0] in lifted and node.output[0] not in used)
    )


def _node(
    operator: str, inputs: list[str], output: str, name: str, attributes: Mapping[str, list[int]]
) -> onnx.NodeProto:
    node = onnx.helper.make_node(operator, inputs, [output], name=name)
    node.attribute.extend(onnx.helper.make_attribute(key, value) for key, value in attributes.items())
    return node


def _last_but_one(graph: onnx.GraphProto, *names: str) -> int:
    """The last axis but one of a value [batch, tokens, ..], which must be a number."""
    for value in graph.value_info:
        if value.name in names and len(value.type.tensor_type.shape.dim) == 3:
            axis = value.type.tensor_type.shape.dim[1]
            if axis.HasField("dim_value"):
                return int(axis.dim_value)
    raise EngineError(f"the graph does not say how many tokens {names[0]} has", fix="build the bundle again")


def _is_lifted(initializer: onnx.TensorProto) -> bool:
    if initializer.data_location != onnx.TensorProto.EXTERNAL:
        return False
    # Scales are stored beside their weight, under its name and a suffix of their own.
    return weight_class(initializer.name) in TABLES


def engine_table(
    graph: GraphName,
    spec: ModelSpec,
    dtype: ActivationDType,
    max_context: int,
    max_batch: int,
    lifted: Mapping[str, EngineTensor],
) -> EngineTable:
    """The table of the engine that is to be built: the contract's tensors with their profiles, and the weights.

    Args:
        graph: which one.
        spec: the model.
        dtype: of activations and KV cache.
        max_context: tokens of a row; bounds the cache of full-attention layers.
        max_batch: most rows of a call.
        lifted: from :func:`engine_graph`.
    """
    tokens = spec.canvas_length
    ranges: dict[str, tuple[int, int, int]] = {
        # Kernels are chosen for full calls: those are the ones that somebody waits for.
        "batch": (1, max_batch, max_batch),
        "new_tokens": (1, tokens, max(tokens, ENCODE_CHUNK)),
    }
    for index in range(spec.num_hidden_layers):
        capacity = spec.cache_capacity(index, max_context)
        ranges[f"capacity_{index}"] = (1, capacity, capacity)
    inputs = [_tensor(tensor, "input", ranges) for tensor in graph_inputs(graph, spec, dtype)]
    outputs = [_tensor(tensor, "output", {}) for tensor in graph_outputs(graph, spec, dtype)]
    return EngineTable(graph=graph, tensors=(*inputs, *lifted.values(), *outputs))


def _tensor(tensor: TensorSpec, mode: str, ranges: Mapping[str, tuple[int, int, int]]) -> EngineTensor:
    profile = None
    if ranges and any(isinstance(axis, str) for axis in tensor.shape):
        smallest, best, largest = (
            tuple(ranges[axis][which] if isinstance(axis, str) else axis for axis in tensor.shape) for which in range(3)
        )
        profile = Profile(min=smallest, opt=best, max=largest)
    return EngineTensor.model_validate(
        {"name": tensor.name, "mode": mode, "dtype": tensor.dtype, "shape": tensor.shape, "profile": profile}
    )
