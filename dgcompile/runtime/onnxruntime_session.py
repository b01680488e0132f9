"""The CPU session: both graphs in onnxruntime, every buffer bound by address, so that no step copies the cache."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime

from dgcompile.bundle import Bundle
from dgcompile.contract import GraphName, TensorSpec, graph_inputs, graph_outputs, past_names, present_names
from dgcompile.engine_table import graph_engine_file
from dgcompile.errors import BundleError, EngineError, RequestError
from dgcompile.model_spec import ModelSpec
from dgcompile.runtime.kv_cache import Array, KVCache
from dgcompile.runtime.session import Batch, HostBatch

MAX_THREADS = 1024
"""Of an engine call: far beyond any machine, onnxruntime takes minutes to start them all."""

_ENCODER_FILE = graph_engine_file("encoder")
_DENOISER_FILE = graph_engine_file("denoiser")
_CACHE_DTYPES = {"tensor(float)": "float32", "tensor(float16)": "float16"}
_ONNX_TYPES = {
    "float32": "tensor(float)",
    "float16": "tensor(float16)",
    "int32": "tensor(int32)",
    "bool": "tensor(bool)",
}


class OnnxRuntimeSession:
    """A bundle of the cpu target, loaded.

    Args:
        folder: holds the engines and the weights they point to.
        spec: the model that the graphs must match.
        max_context: tokens that a row may hold at most.
        threads: threads of each engine call; None leaves the choice to onnxruntime (one per physical core).

    Raises:
        BundleError: a graph's inputs or outputs are not those of the model.
        EngineError: onnxruntime cannot load a graph.
        RequestError: ``threads`` is below 1.
    """

    def __init__(self, folder: Path, spec: ModelSpec, max_context: int, threads: int | None = None) -> None:
        if threads is not None and not 1 <= threads <= MAX_THREADS:
            raise RequestError(f"the number of threads is {threads}", expected=f"from 1 to {MAX_THREADS}")
        self._spec = spec
        self._max_context = max_context
        self._encoder = _load(folder / _ENCODER_FILE, session_options(folder, threads))
        options = session_options(folder, threads)
        # All tensors of a step in one plan, which uses memory again while it is in the CPU's cache: a tenth of a step.
        # A plan is kept for each combination of input shapes: few here, but one for every length of a prompt there.
        options.enable_mem_pattern = True
        self._denoiser = _load(folder / _DENOISER_FILE, options)
        self._dtype = np.dtype(_cache_dtype(folder / _DENOISER_FILE, self._denoiser))
        _check_interface(folder / _ENCODER_FILE, "encoder", self._encoder, spec, self._dtype)
        _check_interface(folder / _DENOISER_FILE, "denoiser", self._denoiser, spec, self._dtype)

    @classmethod
    def open(cls, bundle: Bundle, threads: int | None = None) -> OnnxRuntimeSession:
        """Loads an opened bundle; errors as the constructor's."""
        return cls(bundle.path, bundle.spec, bundle.max_context, threads)

    @property
    def spec(self) -> ModelSpec:
        """The model."""
        return self._spec

    @property
    def max_context(self) -> int:
        """Tokens (prompt and whole canvases) that a row may hold at most."""
        return self._max_context

    @property
    def max_batch(self) -> None:
        """Rows that a batch may have at most: no limit but the machine's memory."""
        return None

    def new_batch(self, rows: int, capacity: int) -> HostBatch:
        """Allocates the state of ``rows`` rows whose caches hold up to ``capacity`` tokens each."""
        return HostBatch(self._spec, KVCache(self._spec, rows, capacity, self._dtype), self._dtype)

    def encode(
        self, batch: Batch, input_ids: npt.NDArray[np.int32], input_length: npt.NDArray[np.int32], first: int = 0
    ) -> None:
        """Runs the encoder on R rows and commits the new tokens, as :meth:`Session.encode` says."""
        assert isinstance(batch, HostBatch), "a batch belongs to the session that made it"
        rows, new_tokens = input_ids.shape
        keys, values = (
            [
                np.empty((rows, new_tokens, layer.num_key_value_heads, layer.head_dim), dtype=self._dtype)
                for layer in self._spec.layers
            ]
            for _ in range(2)
        )
        # The new rows go to scratch: the encoder still reads the slots of the ring that they will overwrite.
        outputs: dict[str, Array] = {}
        for index in range(len(keys)):
            key_name, value_name = present_names(index)
            outputs |= {key_name: keys[index], value_name: values[index]}
        inputs: dict[str, Array] = {
            "input_ids": np.ascontiguousarray(input_ids, dtype=np.int32),
            "input_length": np.ascontiguousarray(input_length, dtype=np.int32),
            "past_length": batch.cache.past_length[first : first + rows],
        }
        inputs |= _past_inputs(batch.cache, slice(first, first + rows))
        binding = _bind(self._encoder, inputs, outputs)
        _run(self._encoder, binding, _ENCODER_FILE)
        batch.cache.append(keys, values, input_length, first)

    def denoise(self, batch: Batch, first: int, last: int) -> None:
        """Runs one denoising step on rows ``first`` .. ``last``, as :meth:`Session.denoise` says."""
        assert isinstance(batch, HostBatch), "a batch belongs to the session that made it"
        where = (batch.parity, first, last)
        binding = batch.bindings.get(where)
        if binding is None:
            binding = batch.bindings[where] = self._bind_denoiser(batch, slice(first, last + 1))
        _run(self._denoiser, binding, _DENOISER_FILE)
        batch.swap()

    def _bind_denoiser(self, batch: HostBatch, rows: slice) -> onnxruntime.IOBinding:
        inputs: dict[str, Array] = {
            "canvas_ids": batch.canvas_ids[rows],
            "self_conditioning": batch.self_conditioning[rows],
            "past_length": batch.cache.past_length[rows],
            "temperature": batch.temperature[rows],
            "entropy_bound": batch.entropy_bound[rows],
            "uniform": batch.uniform[rows],
            "noise_ids": batch.noise_ids[rows],
        }
        inputs |= _past_inputs(batch.cache, rows)
        outputs: dict[str, Array] = {
            "next_canvas_ids": batch.next_canvas_ids[rows],
            "argmax_ids": batch.argmax_ids[rows],
            "next_self_conditioning": batch.next_self_conditioning[rows],
            "accepted": batch.accepted[rows],
            "entropy": batch.entropy[rows],
        }
        return _bind(self._denoiser, inputs, outputs)


def _past_inputs(cache: KVCache, rows: slice) -> dict[str, Array]:
    inputs: dict[str, Array] = {}
    for index, (keys, values) in enumerate(zip(cache.keys, cache.values, strict=True)):
        key_name, value_name = past_names(index)
        inputs |= {key_name: keys[rows], value_name: values[rows]}
    return inputs


def _bind(
    engine: onnxruntime.InferenceSession, inputs: dict[str, Array], outputs: dict[str, Array]
) -> onnxruntime.IOBinding:
    """Binds the arrays' own memory. The caller keeps the arrays alive; they must be C-contiguous."""
    binding = engine.io_binding()
    for bind, arrays in ((binding.bind_input, inputs), (binding.bind_output, outputs)):
        for name, array in arrays.items():
            if not array.flags.c_contiguous:
                raise ValueError(f"{name} is not contiguous and cannot be bound by its address")
            bind(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
    return binding


def _run(engine: onnxruntime.InferenceSession, binding: onnxruntime.IOBinding, name: str) -> None:
    try:
        engine.run_with_iobinding(binding)
    except Exception as error:  # onnxruntime's exceptions have no common base
        raise EngineError(f"{name}: onnxruntime failed while running it: {error}") from error


def session_options(folder: Path, threads: int | None = None) -> onnxruntime.SessionOptions:
    """How engines run.

    Args:
        folder: where the files are that they point to.
        threads: of each call; None leaves the choice to onnxruntime.
    """
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    options.inter_op_num_threads = 1
    options.intra_op_num_threads = threads or 0
    options.log_severity_level = 3
    # Engines are loaded from memory, since onnxruntime would look for the weights beside an engine's own file only.
    place = os.fspath(folder.resolve())
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", place)
    # onnxruntime would keep packed copies of the weights, for each session. Without packing, and without folding the
    # weights' transposes (LOADING), both sessions read the weights where the file is mapped: a model with 250 MB of
    # weights takes 55 MB of memory of its own instead of 650 MB and loads five times faster; a step takes 5 % longer.
    options.add_session_config_entry("session.disable_prepacking", "1")
    # onnxruntime would round activations to int8 beside dequantized weights, and weights to int8 beside a Transpose.
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    options.enable_mem_pattern = False
    return options


LOADING: Mapping[str, Any] = {"providers": ["CPUExecutionProvider"], "disabled_optimizers": ["ConstantFolding"]}
"""Further arguments of ``onnxruntime.InferenceSession``."""


def _load(path: Path, options: onnxruntime.SessionOptions) -> onnxruntime.InferenceSession:
    if not path.is_file():
        raise BundleError(f"{path}: no such file", expected="an engine", fix="build the bundle again")
    try:
        return onnxruntime.InferenceSession(path.read_bytes(), options, **LOADING)
    except Exception as error:  # onnxruntime's exceptions have no common base
        raise EngineError(
            f"{path}: onnxruntime {onnxruntime.__version__} cannot load it: {error}", fix="build the bundle again"
        ) from error


def _cache_dtype(path: Path, engine: onnxruntime.InferenceSession) -> str:
    types = {tensor.name: tensor.type for tensor in engine.get_inputs()}
    found = types.get("self_conditioning")
    if found not in _CACHE_DTYPES:
        raise BundleError(
            f"{path}: the input self_conditioning is {found or 'missing'}",
            expected=" or ".join(_CACHE_DTYPES),
            fix="build the bundle again",
        )
    return _CACHE_DTYPES[found]


def _check_interface(
    path: Path, graph: GraphName, engine: onnxruntime.InferenceSession, spec: ModelSpec, dtype: np.dtype[Any]
) -> None:
    """Compares a graph with the contract: addresses are bound, so a wrong shape would read or write foreign memory."""
    cache_dtype: Any = dtype.name
    for kind, found, wanted in (
        ("input", engine.get_inputs(), graph_inputs(graph, spec, cache_dtype)),
        ("output", engine.get_outputs(), graph_outputs(graph, spec, cache_dtype)),
    ):
        by_name = {tensor.name: tensor for tensor in found}
        odd = by_name.keys() ^ {tensor.name for tensor in wanted}
        if odd:
            name = sorted(odd)[0]
            raise BundleError(
                f"{path}: the {kind} {name} is {'unknown' if name in by_name else 'missing'}",
                expected=f"the {len(wanted)} {kind}s of this model's {graph}",
                fix="build the bundle again with this version of dgcompile",
            )
        for tensor in wanted:
            _check_tensor(path, kind, by_name[tensor.name], tensor)


def _check_tensor(path: Path, kind: str, found: Any, wanted: TensorSpec) -> None:
    shape = list(found.shape)
    fits = len(shape) == len(wanted.shape) and all(
        axis == size
        for axis, size in zip(shape, wanted.shape, strict=True)
        if isinstance(size, int) and isinstance(axis, int)
    )
    if not fits or found.type != _ONNX_TYPES.get(wanted.dtype):
        raise BundleError(
            f"{path}: the {kind} {wanted.name} is {found.type} {shape}",
            expected=f"{wanted.dtype} {list(wanted.shape)}",
            fix="build the bundle again; a model runs only with the shapes it was trained with",
        )
