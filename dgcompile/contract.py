"""The inputs and outputs of the two graphs: names, dtypes and symbolic shapes, derived from a ModelSpec.

Tracing names the graphs' tensors by it, sessions bind buffers by it, and the manifest records it. Axes are symbols:
``batch`` rows, ``new_tokens`` of one encoder call, ``canvas`` positions, ``capacity_{i}`` rows of layer i's cache.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from dgcompile.model_spec import ModelSpec

Axis = int | str
DType = Literal["float32", "float16", "bfloat16", "int32", "bool"]
GraphName = Literal["encoder", "denoiser"]

GRAPH_FILES: dict[GraphName, str] = {"encoder": "encoder.onnx", "denoiser": "denoiser.onnx"}
"""Names of the two graphs in a bundle."""


ONNX_DOMAIN = "dgcompile"
"""Domain of the custom operators' nodes, and namespace of their plugins."""


class TensorSpec(BaseModel):
    """One graph input or output: its name, dtype and shape (an axis is a number or a symbol)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    dtype: DType
    shape: tuple[int | str, ...]


def past_names(layer: int) -> tuple[str, str]:
    """Names of the cache inputs of one layer."""
    return f"past_key_values.{layer}.key", f"past_key_values.{layer}.value"


def present_names(layer: int) -> tuple[str, str]:
    """Names of the encoder's outputs (new cache rows) of one layer."""
    return f"present.{layer}.key", f"present.{layer}.value"


def _past_inputs(spec: ModelSpec, dtype: DType) -> list[TensorSpec]:
    return [
        TensorSpec(
            name=name, dtype=dtype, shape=("batch", f"capacity_{index}", layer.num_key_value_heads, layer.head_dim)
        )
        for index, layer in enumerate(spec.layers)
        for name in past_names(index)
    ]


def graph_inputs(graph: GraphName, spec: ModelSpec, dtype: DType) -> list[TensorSpec]:
    """Inputs of a graph in their order.

    Args:
        graph: which of the two graphs.
        spec: the model.
        dtype: dtype of the KV cache and of the self-conditioning signal.
    """
    if graph == "encoder":
        leading = [
            TensorSpec(name="input_ids", dtype="int32", shape=("batch", "new_tokens")),
            TensorSpec(name="input_length", dtype="int32", shape=("batch",)),
            TensorSpec(name="past_length", dtype="int32", shape=("batch",)),
        ]
    else:
        canvas = spec.canvas_length
        leading = [
            TensorSpec(name="canvas_ids", dtype="int32", shape=("batch", canvas)),
            TensorSpec(name="self_conditioning", dtype=dtype, shape=("batch", canvas, spec.hidden_size)),
            TensorSpec(name="past_length", dtype="int32", shape=("batch",)),
            TensorSpec(name="temperature", dtype="float32", shape=("batch",)),
            TensorSpec(name="entropy_bound", dtype="float32", shape=("batch",)),
            TensorSpec(name="uniform", dtype="float32", shape=("batch", canvas)),
            TensorSpec(name="noise_ids", dtype="int32", shape=("batch", canvas)),
        ]
    return leading + _past_inputs(spec, dtype)


def graph_outputs(graph: GraphName, spec: ModelSpec, dtype: DType) -> list[TensorSpec]:
    """Outputs of a graph in their order; arguments as in :func:`graph_inputs`."""
    if graph == "encoder":
        return [
            TensorSpec(name=name, dtype=dtype, shape=("batch", "new_tokens", layer.num_key_value_heads, layer.head_dim))
            for index, layer in enumerate(spec.layers)
            for name in present_names(index)
        ]
    canvas = spec.canvas_length
    return [
        TensorSpec(name="next_canvas_ids", dtype="int32", shape=("batch", canvas)),
        TensorSpec(name="argmax_ids", dtype="int32", shape=("batch", canvas)),
        TensorSpec(name="next_self_conditioning", dtype=dtype, shape=("batch", canvas, spec.hidden_size)),
        TensorSpec(name="accepted", dtype="bool", shape=("batch", canvas)),
        TensorSpec(name="entropy", dtype="float32", shape=("batch", canvas)),
    ]
