"""One custom node, rewritten as the engines of the cpu target have it, run by onnxruntime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
from onnxruntime import OrtValue

from dgcompile.build.onnxruntime.engines import rewrite
from dgcompile.contract import ONNX_DOMAIN
from dgcompile.runtime.onnxruntime_session import LOADING, session_options
from dgcompile.trace.functions import OPSET
from dgcompile.trace.nodes import ONNX_DOMAIN_VERSION


def weights_in_file(folder: Path, weights: dict[str, tuple[np.ndarray, ir.DataType]]) -> dict[str, ir.Value]:
    """Initializers whose bytes lie in one file, as those of traced graphs do."""
    values: dict[str, ir.Value] = {}
    with (folder / "weights.bin").open("wb") as file:
        for name, (array, dtype) in weights.items():
            offset = file.tell()
            file.write(np.ascontiguousarray(array).tobytes())
            shape = ir.Shape(array.shape)
            place = ir.ExternalTensor("weights.bin", offset, array.nbytes, dtype, shape=shape, name=name)
            values[name] = ir.Value(name=name, shape=shape, type=ir.TensorType(dtype), const_value=place)
    return values


def run(model: ir.Model, folder: Path, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Outputs of an engine."""
    session = onnxruntime.InferenceSession(
        ir.to_proto(model).SerializeToString(), session_options(folder, threads=2), **LOADING
    )
    values = {name: OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array)) for name, array in inputs.items()}
    return [value.numpy() for value in session.run_with_ort_values(None, values)]


def run_node(
    op_type: str,
    inputs: dict[str, np.ndarray],
    folder: Path,
    weights: dict[str, tuple[np.ndarray, ir.DataType]] | None = None,
    **attributes: Any,
) -> np.ndarray:
    """The output of a custom node.

    Args:
        op_type: of the node.
        inputs: its first inputs, by name.
        folder: for the weights, if there are any.
        weights: its further inputs, by name.
        attributes: of the node.
    """
    given = {
        name: ir.Value(
            name=name,
            shape=ir.Shape([None if axis < 2 else size for axis, size in enumerate(array.shape)]),
            type=ir.TensorType(ir.DataType.from_numpy(array.dtype)),
        )
        for name, array in inputs.items()
    }
    if op_type == "MixtureOfExperts":  # traced graphs know all but the number of tokens
        for name, value in given.items():
            value.shape = ir.Shape([None, inputs[name].shape[1]])
    stored = weights_in_file(folder, weights) if weights else {}
    node = ir.node(op_type, [*given.values(), *stored.values()], domain=ONNX_DOMAIN, attributes=attributes, name="node")
    (output,) = node.outputs
    first = next(iter(given.values()))
    output.name, output.type, output.shape = "output", first.type, first.shape
    graph = ir.Graph(
        list(given.values()),
        [output],
        nodes=[node],
        initializers=list(stored.values()),
        opset_imports={"": OPSET, ONNX_DOMAIN: ONNX_DOMAIN_VERSION},
        name="one_node",
    )
    model = ir.Model(graph, ir_version=10)
    rewrite("encoder", model)
    assert all(node.domain != ONNX_DOMAIN for node in model.graph)
    return run(model, folder, inputs)[0]
