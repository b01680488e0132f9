"""Runs one custom node through onnxruntime by its ONNX function."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper
from onnxruntime import OrtValue

from dgcompile.contract import ONNX_DOMAIN
from dgcompile.plugins.moe.formats import WeightFormat
from dgcompile.trace.functions import OPSET, function_protos
from dgcompile.trace.nodes import ONNX_DOMAIN_VERSION


def run_node(
    op_type: str,
    inputs: dict[str, np.ndarray],
    *,
    weight_format: WeightFormat = "float",
    e4m3: tuple[str, ...] = (),
    **attributes: Any,
) -> np.ndarray:
    """The single output of a ``dgcompile`` node for numpy inputs.

    Args:
        op_type: of the node.
        inputs: by name, in order.
        weight_format: whose functions are attached; an attribute of nodes of MixtureOfExperts.
        e4m3: inputs whose bytes are E4M3.
        attributes: the others.
    """
    if op_type == "MixtureOfExperts":
        attributes["weight_format"] = weight_format
    node = helper.make_node(op_type, list(inputs), ["output"], domain=ONNX_DOMAIN, **attributes)
    types = {name: helper.np_dtype_to_tensor_dtype(value.dtype) for name, value in inputs.items()}
    types |= dict.fromkeys(e4m3, TensorProto.FLOAT8E4M3FN)
    first = next(iter(inputs))
    graph = helper.make_graph(
        [node],
        "one_node",
        [helper.make_tensor_value_info(name, types[name], [None] * value.ndim) for name, value in inputs.items()],
        [helper.make_tensor_value_info("output", types[first], [None] * inputs[first].ndim)],
    )
    imports = [helper.make_opsetid("", OPSET), helper.make_opsetid(ONNX_DOMAIN, ONNX_DOMAIN_VERSION)]
    model = helper.make_model(graph, opset_imports=imports, functions=function_protos(weight_format), ir_version=10)
    onnx.checker.check_model(model)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    values = {
        name: OrtValue.ortvalue_from_numpy_with_onnx_type(np.ascontiguousarray(value), types[name])
        for name, value in inputs.items()
    }
    return session.run_with_ort_values(["output"], values)[0].numpy()
