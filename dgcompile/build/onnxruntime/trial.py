"""What the traced graphs need of ONNX Runtime, and proof that it runs the engines made of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dgcompile.bundle import EngineLibrary, GraphRecord, version_key
from dgcompile.contract import DType, GraphName, TensorSpec, graph_inputs, graph_outputs, past_names, present_names
from dgcompile.engine_table import graph_engine_file
from dgcompile.errors import EngineError, TraceError
from dgcompile.model_spec import ModelSpec
from dgcompile.progress import Progress

Array = NDArray[Any]

_OLDEST_FOR_OPSET = {21: "1.18.0", 22: "1.21.0", 23: "1.22.0", 24: "1.23.0"}
_OLDEST_FOR_IR = {10: "1.18.0", 11: "1.22.0", 12: "1.23.0"}
"""First ONNX Runtime that implements an opset, or reads an IR version: https://onnxruntime.ai/docs/reference/compatibility
(ONNX 1.16 in 1.18, 1.17 in 1.21, 1.18 in 1.22, 1.19 in 1.23)."""

_OLDEST_SUPPORTED = "1.22.0"
"""What the dgcompile package itself asks for."""

_ONNX_TYPES: Mapping[DType, str] = {
    "float32": "tensor(float)",
    "float16": "tensor(float16)",
    "bfloat16": "tensor(bfloat16)",
    "int32": "tensor(int32)",
    "bool": "tensor(bool)",
}


def read_graph(path: Path, graph: GraphName, spec: ModelSpec, dtype: DType) -> GraphRecord:
    """Reads which operator sets a traced graph needs and checks its inputs and outputs against the contract.

    Raises:
        TraceError: the graph is not one that sessions can bind.
    """
    import onnx

    model = onnx.load(str(path), load_external_data=False)
    declared = {"inputs": model.graph.input, "outputs": model.graph.output}
    expected = {"inputs": graph_inputs(graph, spec, dtype), "outputs": graph_outputs(graph, spec, dtype)}
    for kind, tensors in expected.items():
        names = [value.name for value in declared[kind]]
        if names != [tensor.name for tensor in tensors]:
            raise TraceError(
                f"{path.name}: its {kind} are {', '.join(names)}", expected=", ".join(t.name for t in tensors)
            )
    return GraphRecord(
        opsets={opset.domain: opset.version for opset in model.opset_import},
        ir_version=model.ir_version,
        inputs=tuple(expected["inputs"]),
        outputs=tuple(expected["outputs"]),
    )


def oldest_version(graphs: Mapping[GraphName, GraphRecord], current: str) -> str:
    """The oldest ONNX Runtime that can load the graphs; ``current`` when they are newer than this module knows."""
    needs = [_OLDEST_SUPPORTED]
    for record in graphs.values():
        for table, needed in ((_OLDEST_FOR_OPSET, record.opsets.get("", 1)), (_OLDEST_FOR_IR, record.ir_version)):
            needs.append(next((version for level, version in table.items() if level >= needed), current))
    return max(needs, key=version_key)


def try_engines(
    folder: Path, graphs: Mapping[GraphName, GraphRecord], spec: ModelSpec, dtype: DType, progress: Progress
) -> EngineLibrary:
    """Loads both engines, encodes two tokens and runs one denoising step on the cache they fill.

    One session lives at a time, without prepacked copies of the weights: the weights stay mapped from the file.

    Args:
        folder: holds the engines and the weights.
        graphs: what the trace stage recorded.
        spec: the model.
        dtype: of cache and self-conditioning.
        progress: told about the four steps.

    Raises:
        EngineError: a graph cannot be loaded or run, or gives shapes, ids or numbers that it must not; names the graph.
    """
    import onnxruntime

    batch, tokens, canvas = 1, 2, spec.canvas_length
    number = np.float16 if dtype == "float16" else np.float32
    with progress.task("engine", 4, "steps") as advance:
        cache = {
            name: np.zeros(
                (batch, spec.cache_capacity(index, tokens), layer.num_key_value_heads, layer.head_dim), dtype=number
            )
            for index, layer in enumerate(spec.layers)
            for name in past_names(index)
        }
        session = _load(folder, "encoder", graphs)
        advance()
        present = _run(
            session,
            "encoder",
            graphs,
            {
                "input_ids": np.array([[0, spec.vocab_size - 1]], dtype=np.int32),
                "input_length": np.full(batch, tokens, dtype=np.int32),
                "past_length": np.zeros(batch, dtype=np.int32),
                **cache,
            },
            {"batch": batch, "new_tokens": tokens},
        )
        del session
        advance()
        for index in range(spec.num_hidden_layers):
            for past, new in zip(past_names(index), present_names(index), strict=True):
                # A ring of fewer slots than tokens keeps the last ones, each in slot position % capacity.
                for position in range(tokens):
                    cache[past][:, position % cache[past].shape[1]] = present[new][:, position]
        session = _load(folder, "denoiser", graphs)
        advance()
        step = _run(
            session,
            "denoiser",
            graphs,
            {
                "canvas_ids": np.arange(canvas, dtype=np.int32)[None] % spec.vocab_size,
                "self_conditioning": np.zeros((batch, canvas, spec.hidden_size), dtype=number),
                "past_length": np.full(batch, tokens, dtype=np.int32),
                "temperature": np.full(batch, 0.8, dtype=np.float32),
                "entropy_bound": np.full(batch, 0.1, dtype=np.float32),
                "uniform": np.linspace(0, 1, canvas, endpoint=False, dtype=np.float32)[None],
                "noise_ids": np.arange(canvas, dtype=np.int32)[None] % spec.vocab_size,
                **cache,
            },
            {"batch": batch},
        )
        for name in ("next_canvas_ids", "argmax_ids"):
            if step[name].min() < 0 or step[name].max() >= spec.vocab_size:
                raise EngineError(
                    f"{graph_engine_file('denoiser')}: {name} holds ids from {step[name].min()} to {step[name].max()}",
                    expected=f"0 to {spec.vocab_size - 1}",
                )
        advance()
    version = onnxruntime.__version__
    return EngineLibrary(name="onnxruntime", version=version, oldest_version=oldest_version(graphs, version))


def _load(folder: Path, graph: GraphName, graphs: Mapping[GraphName, GraphRecord]) -> Any:
    """An onnxruntime.InferenceSession whose inputs and outputs are those of the contract."""
    import onnxruntime

    from dgcompile.runtime.onnxruntime_session import LOADING, session_options

    file = graph_engine_file(graph)
    options = session_options(folder)
    options.log_severity_level = 4  # its errors arrive as exceptions
    try:
        session = onnxruntime.InferenceSession((folder / file).read_bytes(), options, **LOADING)
    except Exception as error:  # onnxruntime's exceptions have no common base but this one
        raise EngineError(
            f"{file}: onnxruntime {onnxruntime.__version__} cannot load it: {_first_line(error)}"
        ) from error
    for kind, found, expected in (
        ("input", session.get_inputs(), graphs[graph].inputs),
        ("output", session.get_outputs(), graphs[graph].outputs),
    ):
        actual = {value.name: (value.type, value.shape) for value in found}
        for tensor in expected:
            if tensor.name not in actual:
                raise EngineError(f"{file}: the {kind} {tensor.name} is missing")
            element, shape = actual[tensor.name]
            fixed = [b for a, b in zip(shape, tensor.shape, strict=False) if isinstance(a, int) and a != b]
            if element != _ONNX_TYPES[tensor.dtype] or len(shape) != len(tensor.shape) or fixed:
                raise EngineError(
                    f"{file}: the {kind} {tensor.name} is {element} {shape}",
                    expected=f"{_ONNX_TYPES[tensor.dtype]} {list(tensor.shape)}",
                )
    return session


def _run(
    session: Any,
    graph: GraphName,
    graphs: Mapping[GraphName, GraphRecord],
    inputs: Mapping[str, Array],
    axes: Mapping[str, int],
) -> dict[str, Array]:
    """Runs a graph once and checks every output's shape and that its numbers are finite."""
    file, outputs = graph_engine_file(graph), graphs[graph].outputs
    try:
        results = session.run([tensor.name for tensor in outputs], dict(inputs))
    except Exception as error:  # as above
        raise EngineError(f"{file}: a first run failed: {_first_line(error)}") from error
    for tensor, result in zip(outputs, results, strict=True):
        expected = _shape(tensor, axes)
        if result.shape != expected:
            raise EngineError(f"{file}: {tensor.name} has the shape {result.shape}", expected=str(expected))
        if not np.isfinite(result).all():
            raise EngineError(
                f"{file}: {tensor.name} holds NaN or infinity after a first run", expected="finite numbers"
            )
    return {tensor.name: result for tensor, result in zip(outputs, results, strict=True)}


def _shape(tensor: TensorSpec, axes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(axes[axis] if isinstance(axis, str) else axis for axis in tensor.shape)


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
