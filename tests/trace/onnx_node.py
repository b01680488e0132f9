"""Runs one custom node through onnxruntime by its ONNX function."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import helper

from dgcompile.contract import ONNX_DOMAIN
from dgcompile.trace.functions import OPSET, function_protos
from dgcompile.trace.nodes import ONNX_DOMAIN_VERSION


def run_node(op_type: str, inputs: dict[str, np.ndarray], **attributes: Any) -> np.ndarray:
    """The single output of a ``dgcompile`` node for numpy inputs."""
    node = helper.make_node(op_type, list(inputs), ["output"], domain=ONNX_DOMAIN, **attributes)
    element = helper.np_dtype_to_tensor_dtype(next(iter(inputs.values())).dtype)
    graph = helper.make_graph(
        [node],
        "one_node",
        [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), [None] * value.ndim)
            for name, value in inputs.items()
        ],
        [helper.make_tensor_value_info("output", element, [None] * next(iter(inputs.values())).ndim)],
    )
    imports = [helper.make_opsetid("", OPSET), helper.make_opsetid(ONNX_DOMAIN, ONNX_DOMAIN_VERSION)]
    model = helper.make_model(graph, opset_imports=imports, functions=function_protos(), ir_version=10)
    onnx.checker.check_model(model)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, inputs)[0]
