"""One traced module -> one ONNX file whose weights are references into the store."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from onnxscript import optimizer
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, ExportedProgram

from dgcompile.contract import ONNX_DOMAIN, GraphName, TensorSpec, graph_inputs, graph_outputs
from dgcompile.errors import TraceError
from dgcompile.files import write_atomically
from dgcompile.model_spec import ModelSpec
from dgcompile.plugins.moe.formats import WeightFormat
from dgcompile.recipe import ActivationDType
from dgcompile.trace.functions import OPSET, function_protos
from dgcompile.trace.modules import DenoiserGraph, EncoderGraph
from dgcompile.trace.nodes import ONNX_DOMAIN_VERSION, TRANSLATIONS
from dgcompile.trace.weights import INLINE_LIMIT, quantize_activations, take_out_weights
from dgcompile.weights_store import Store

IR_VERSION = 10
"""ONNX IR version of the files: the first with opset 21 and 4-bit integers, read by onnxruntime 1.18 and later."""

_TORCH_DTYPES = {"int32": torch.int32, "float32": torch.float32, "bfloat16": torch.bfloat16}


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
    store: Store,
    weight_format: WeightFormat,
) -> ir.Model:
    """Converts a traced program: custom nodes, contract names, weights as references, constants folded.

    Args:
        graph: which graph it is.
        program: from :func:`export_program`.
        spec: the model's shape.
        dtype: of activations, KV cache and self-conditioning.
        store: where the weights lie, and in which formats.
        weight_format: of the experts, as their operator knows it.

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
    _fold_constants(model, take_out_weights(model, store))
    for scale in quantize_activations(model, store):
        model.graph.register_initializer(scale)
    _check_constants(graph, model)
    _name_waypoints(graph, model, spec)
    for proto in function_protos(weight_format):
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


def _name_waypoints(graph: GraphName, model: ir.Model, spec: ModelSpec) -> None:
    """Names the values that a comparison looks at: ``hidden_states.{i}``, the output of layer i [B, tokens, H], and in
    the denoiser ``logits`` [B, L, V], softcapped and not yet divided by the temperature."""
    prefix = {"encoder": "model.encoder.language_model", "denoiser": "model.decoder"}[graph]
    for index in range(spec.num_hidden_layers):
        factor = model.graph.initializers.get(f"{prefix}.layers.{index}.layer_scalar")
        if factor is None:
            continue  # the encoder's last layer ends in its keys and values
        (user,) = factor.consumers()
        (multiplied,) = user.outputs[0].consumers() if user.op_type == "Cast" else (user,)
        multiplied.outputs[0].name = f"hidden_states.{index}"
    if graph == "denoiser":
        softcap = [node for node in model.graph if node.op_type == "Tanh"]
        if not softcap or len(scaled := list(softcap[-1].outputs[0].consumers())) != 1:
            raise TraceError("the denoiser's logits are not softcapped by one tanh and one factor")
        scaled[0].outputs[0].name = "logits"


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
