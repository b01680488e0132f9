"""One traced module -> one ONNX file whose weights are references into the store."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from onnxscript import optimizer
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, ExportedProgram

from dgcompile.checkpoint import canonical_name
from dgcompile.contract import ONNX_DOMAIN, GraphName, TensorSpec, graph_inputs, graph_outputs
from dgcompile.errors import TraceError
from dgcompile.files import write_atomically
from dgcompile.model_spec import ModelSpec
from dgcompile.recipe import ActivationDType
from dgcompile.safetensors_file import StoredTensor
from dgcompile.trace.functions import OPSET, function_protos
from dgcompile.trace.modules import DenoiserGraph, EncoderGraph
from dgcompile.trace.nodes import ONNX_DOMAIN_VERSION, TRANSLATIONS

IR_VERSION = 10
"""ONNX IR version of the files: the first with opset 21 and 4-bit integers, read by onnxruntime 1.18 and later."""

INLINE_LIMIT = 64 * 1024
"""Largest constant in bytes that may lie in the graph itself; anything larger belongs into the weights store."""

_TORCH_DTYPES = {"int32": torch.int32, "float32": torch.float32, "bfloat16": torch.bfloat16}
_STORED_DTYPES = {"F32": ir.DataType.FLOAT, "F16": ir.DataType.FLOAT16, "BF16": ir.DataType.BFLOAT16}


def export_program(
    graph: GraphName,
    module: EncoderGraph | DenoiserGraph,
    spec: ModelSpec,
    dtype: ActivationDType,
    fake: FakeTensorMode,
) -> ExportedProgram:
    """Traces one of the two modules with dynamic batch, prompt length and cache capacities; runnable in torch.

    Args:
        graph: which graph the module is.
        module: the module around the swapped model.
        spec: the model's shape.
        dtype: of activations, KV cache and self-conditioning.
        fake: the fake mode of the model's parameters.
    """
    inputs = graph_inputs(graph, spec, dtype)
    # Sizes are all different and none is 1, so that torch does not take two axes for the same or for a constant one.
    symbols = list(dict.fromkeys(axis for tensor in inputs for axis in tensor.shape if isinstance(axis, str)))
    sizes = {symbol: 2 if symbol == "batch" else 5 + index for index, symbol in enumerate(symbols)}
    dimensions = {symbol: Dim(symbol) for symbol in symbols}
    with fake:
        tensors = [
            torch.zeros(
                [sizes[axis] if isinstance(axis, str) else axis for axis in tensor.shape],
                dtype=_TORCH_DTYPES[tensor.dtype],
            )
            for tensor in inputs
        ]
    dynamic = [
        {index: dimensions[axis] for index, axis in enumerate(tensor.shape) if isinstance(axis, str)}
        for tensor in inputs
    ]
    leading = len(inputs) - 2 * spec.num_hidden_layers

    def arguments(flat: list[Any]) -> tuple[Any, ...]:
        return (*flat[:leading], list(zip(flat[leading::2], flat[leading + 1 :: 2], strict=True)))

    with torch.no_grad():
        return torch.export.export(module, arguments(tensors), dynamic_shapes=arguments(dynamic), strict=False)


def to_onnx(
    graph: GraphName,
    program: ExportedProgram,
    spec: ModelSpec,
    dtype: ActivationDType,
    store: Mapping[str, StoredTensor],
) -> ir.Model:
    """Converts a traced program: custom nodes, contract names, weights as references, constants folded.

    Raises:
        TraceError: a weight that the store lacks or holds in another shape, or a large constant outside the store.
    """
    with _quiet():
        exported = torch.onnx.export(
            program,
            dynamo=True,
            optimize=False,
            opset_version=OPSET,
            custom_translation_table=TRANSLATIONS,
            verbose=False,
        )
    assert exported is not None  # with dynamo=True and no file name, the program is returned
    model = exported.model
    model.ir_version = IR_VERSION
    _name_values(model, graph_inputs(graph, spec, dtype), graph_outputs(graph, spec, dtype))
    _fold_constants(model, _take_out_weights(model, store))
    _check_constants(graph, model)
    for proto in function_protos():
        function = ir.serde.deserialize_function(proto)
        model.functions[function.identifier()] = function
    model.opset_imports[ONNX_DOMAIN] = ONNX_DOMAIN_VERSION
    model.producer_name, model.producer_version, model.doc_string = "dgcompile", None, None
    model.graph.name = graph
    _strip_metadata(model)
    return model


def write_onnx(model: ir.Model, path: Path) -> None:
    """Writes the file beside its final name and renames it; equal models give equal bytes."""
    write_atomically(path, ir.to_proto(model).SerializeToString(deterministic=True))


def _name_values(model: ir.Model, inputs: list[TensorSpec], outputs: list[TensorSpec]) -> None:
    """Gives the graph's inputs, outputs and symbolic axes their names of the contract."""
    renamed: dict[str, str] = {}
    for values, specs in ((model.graph.inputs, inputs), (model.graph.outputs, outputs)):
        if len(values) != len(specs):
            raise TraceError(f"the traced graph has {len(values)} inputs or outputs", expected=str(len(specs)))
        for value, spec in zip(values, specs, strict=True):
            value.name = spec.name
            for found, wanted in zip(value.shape or (), spec.shape, strict=True):
                if isinstance(found, ir.SymbolicDim) and isinstance(wanted, str) and found.value:
                    renamed.setdefault(found.value, wanted)
            value.shape = ir.Shape(spec.shape)
    for node in model.graph.all_nodes():
        for output in node.outputs:
            if output.shape is not None and not output.is_graph_output():
                output.shape = ir.Shape(
                    [
                        renamed.get(str(axis.value), axis.value) if isinstance(axis, ir.SymbolicDim) else axis
                        for axis in output.shape
                    ]
                )


def _take_out_weights(model: ir.Model, store: Mapping[str, StoredTensor]) -> list[ir.Value]:
    """Replaces stored initializers by references into the store, one value per tensor; returns those values."""
    weights: dict[str, ir.Value] = {}
    for name, value in list(model.graph.initializers.items()):
        canonical = canonical_name(_stored_key(name))
        stored = store.get(canonical)
        if stored is None:
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
        shape = tuple(value.shape or ())
        if shape != stored.shape:
            raise TraceError(f"{canonical} has shape {list(shape)} in the graph", expected=f"{list(stored.shape)}")
        if canonical not in weights:
            weights[canonical] = _reference(canonical, stored)
        replacement = weights[canonical]
        if value.dtype != replacement.dtype:
            # Stored in another dtype than it is computed with.
            cast = ir.node("Cast", [replacement], attributes={"to": value.dtype}, name=f"cast {canonical}")
            cast.outputs[0].name, cast.outputs[0].shape = f"{canonical} as {value.dtype}", value.shape
            cast.outputs[0].type = value.type
            model.graph.insert_before(model.graph[0], cast)
            replacement = cast.outputs[0]
        value.replace_all_uses_with(replacement)
    return list(weights.values())


def _reference(name: str, stored: StoredTensor) -> ir.Value:
    """An initializer whose bytes lie in the store."""
    dtype, shape = _STORED_DTYPES[stored.dtype], ir.Shape(stored.shape)
    place = ir.ExternalTensor(
        location=stored.file.name, offset=stored.offset, length=stored.nbytes, dtype=dtype, shape=shape, name=name
    )
    return ir.Value(name=name, shape=shape, type=ir.TensorType(dtype), const_value=place)


def _stored_key(name: str) -> str:
    """The checkpoint's key of a traced parameter: the names of the modules that wrap it taken off."""
    name = name.replace("self_conditioning.original.", "self_conditioning.")
    if name.startswith("text_model."):  # EncoderGraph
        return "model.encoder.language_model." + name.removeprefix("text_model.")
    return name.removeprefix("model.")  # DenoiserGraph


def _fold_constants(model: ir.Model, weights: list[ir.Value]) -> None:
    """Simplifies the graph while the weights are mere inputs, so that nothing is computed on them or copied."""
    model.graph.inputs.extend(weights)
    with _quiet():
        optimizer.optimize_ir(model, onnx_shape_inference=False)
    for weight in weights:
        model.graph.inputs.remove(weight)
        model.graph.register_initializer(weight)


def _check_constants(graph: GraphName, model: ir.Model) -> None:
    for node in model.graph.all_nodes():
        attribute = node.attributes.get("value")
        if node.op_type == "Constant" and attribute is not None and attribute.type == ir.AttributeType.TENSOR:
            size = attribute.as_tensor().nbytes
            if size > INLINE_LIMIT:
                raise TraceError(f"{graph}: node {node.name} is a constant of {size} bytes outside the weights store")


def _strip_metadata(model: ir.Model) -> None:
    """Removes the exporter's notes (stack traces with paths of this machine), so that equal inputs give equal bytes."""
    values: Iterator[Any] = (output for node in model.graph.all_nodes() for output in node.outputs)
    for thing in (model, model.graph, *model.graph.all_nodes(), *values):
        thing.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        value.metadata_props.clear()
    for node in model.graph.all_nodes():
        node.doc_string = None


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences the exporter's notices about packages that are not needed here."""
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
