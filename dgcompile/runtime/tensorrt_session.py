"""The GPU session: both engines share the weights on the device, and a denoising step is one graph.

A step costs the host one upload of the small inputs, one replay, one download of the small results and one wait. The KV
cache, the canvases and the self-conditioning signal never leave the device.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt

from dgcompile.bundle import Bundle
from dgcompile.contract import DType, GraphName, TensorSpec, graph_inputs, graph_outputs
from dgcompile.engine_table import EngineDType, EngineTable, EngineTensor, table_file
from dgcompile.errors import BundleError, EngineError, RequestError
from dgcompile.gpu import LIBRARY_EXTRAS, check_gpu
from dgcompile.model_spec import ModelSpec
from dgcompile.progress import Progress
from dgcompile.runtime.cuda_device import CudaDevice
from dgcompile.runtime.device import Block, Device
from dgcompile.runtime.device_batch import (
    INPUTS,
    ITEM_BYTES,
    CacheLayout,
    DeviceBatch,
    DeviceState,
    shapes_of,
)
from dgcompile.runtime.loop import ENCODE_CHUNK
from dgcompile.runtime.session import Batch
from dgcompile.runtime.tensorrt_engine import open_engines
from dgcompile.runtime.weight_loading import device_bytes, load_weights, stored_weights

MIN_NEW_TOKENS = 16
"""Encoder calls are padded to a power of two of at least this many tokens: TensorRT-RTX compiles kernels for each new
shape, and prompts have any length."""


class Context(Protocol):
    """What runs an engine with one set of shapes and addresses."""

    def set_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Sets the shape of an input."""

    def set_address(self, name: str, address: int) -> None:
        """Sets where an input or output lies on the device."""

    def enqueue(self, stream: int) -> None:
        """Enqueues one run."""

    def is_capturable(self, stream: int) -> bool:
        """Whether a run can be captured as a graph."""


class Engine(Protocol):
    """A loaded engine."""

    @property
    def table(self) -> EngineTable:
        """Its tensors."""

    @property
    def workspace_bytes(self) -> int:
        """Device memory that a run needs."""

    def new_context(self, workspace: int) -> Context:
        """A context that uses the workspace at that address."""

    def save_kernels(self) -> None:
        """Keeps what was compiled on this machine for the next start."""


@dataclass
class _Step:
    """The denoising step on certain buffers, for a number of rows and one of the two directions between the copies.

    The context belongs to it alone: changing a context makes a graph captured from it invalid.
    """

    context: Context
    was_run: bool = False
    graph: object = None


class TensorRTSession:
    """A bundle of a GPU target, loaded.

    Args:
        spec: the model that the engines must match.
        max_context: tokens that a row may hold at most.
        max_batch: rows that a batch may have at most.
        device: the GPU; the session closes it.
        engines: both engines.
        weights_file: holds the weights that the engines take as inputs.
        progress: told how far loading them got.
        use_graphs: False runs every step without a graph, to find faults.

    Raises:
        BundleError: an engine's tensors are not those of the model, or a weight is missing.
        EngineError: the memory of the GPU does not suffice.
    """

    def __init__(
        self,
        spec: ModelSpec,
        max_context: int,
        max_batch: int,
        device: Device,
        engines: Mapping[GraphName, Engine],
        weights_file: Path,
        progress: Progress | None = None,
        *,
        use_graphs: bool = True,
    ) -> None:
        self._spec, self._max_context, self._max_batch = spec, max_context, max_batch
        self._device, self._engines, self._use_graphs = device, dict(engines), use_graphs
        # A session that is dropped frees the GPU for the next one. Not at exit: the driver does it then.
        self._finalizer = weakref.finalize(self, device.close)
        self._finalizer.atexit = False
        self._dtype = _activation_dtype(engines["denoiser"].table)
        for graph, engine in engines.items():
            _check_table(graph, engine.table, spec, self._dtype, max_context, max_batch)
        self._max_new_tokens = _largest(engines["encoder"].table, "input_ids")[1]
        self._unsaved = False
        self._free_states: list[DeviceState] = []

        weights = stored_weights([engine.table for engine in engines.values()], weights_file)
        # Where the encoder's new tokens wait until it no longer reads the slots that they will overwrite.
        self._present = CacheLayout(spec, max_batch, self._max_new_tokens, ITEM_BYTES[self._dtype], sliding=False)
        workspace_bytes = max(engine.workspace_bytes for engine in engines.values())
        self._check_memory(
            {
                "weights": device_bytes(weights),
                "cache": CacheLayout(spec, max_batch, max_context, ITEM_BYTES[self._dtype]).nbytes,
                "new tokens": self._present.nbytes,
                "self-conditioning": 2 * max_batch * spec.canvas_length * spec.hidden_size * ITEM_BYTES[self._dtype],
                "workspace": workspace_bytes,
            }
        )
        self._present_address = device.allocate(self._present.nbytes, "new tokens")
        # One workspace for all contexts: there is one stream, so no two of them run at a time.
        self._workspace = device.allocate(workspace_bytes, "workspace")
        self._encoder_inputs = Block(
            device,
            {
                "input_ids": (np.int32, (max_batch * self._max_new_tokens,)),
                "input_length": (np.int32, (max_batch,)),
                "past_length": (np.int32, (max_batch,)),
            },
            "inputs",
        )
        # Before the weights, which take long: too little memory is said at once.
        self._free_states.append(self._new_state())
        self._weights = load_weights(device, weights, progress or Progress())
        self._encoder = self._new_context("encoder")
        device.synchronise()

    @classmethod
    def open(cls, bundle: Bundle, progress: Progress | None = None, *, use_graphs: bool = True) -> TensorRTSession:
        """Loads an opened bundle onto the first GPU that it was built for.

        Raises:
            MissingDependencyError: the engine library or cuda-python is not installed.
            BundleError: no such GPU, a driver that is too old, another version of the library, or a damaged bundle.
            EngineError: the library refuses an engine, or the memory of the GPU does not suffice.
        """
        target = bundle.target
        assert target.compute_capability is not None and bundle.max_batch is not None
        card = check_gpu(target.compute_capability, target.backend)
        device = CudaDevice(card, LIBRARY_EXTRAS[target.backend])
        try:
            engines = open_engines(bundle, progress)
            for engine in engines.values():
                _check_activations(engine.table, bundle.recipe.computes_in)
            return cls(
                bundle.spec,
                bundle.max_context,
                bundle.max_batch,
                device,
                engines,
                bundle.weights_file,
                progress,
                use_graphs=use_graphs,
            )
        except BaseException:
            device.close()
            raise

    @property
    def spec(self) -> ModelSpec:
        """The model."""
        return self._spec

    @property
    def max_context(self) -> int:
        """Tokens (prompt and whole canvases) that a row may hold at most."""
        return self._max_context

    @property
    def max_batch(self) -> int:
        """Rows that a batch may have at most."""
        return self._max_batch

    def new_batch(self, rows: int, capacity: int) -> DeviceBatch:
        """The state of ``rows`` rows whose caches hold up to ``capacity`` tokens each.

        Its buffers are those of a batch that is gone, if there is one.

        Raises:
            RequestError: more rows or tokens than the engines take.
            EngineError: a second batch beside a living one, and no memory for it.
        """
        for number, limit, what in ((rows, self._max_batch, "rows"), (capacity, self._max_context, "tokens")):
            if number > limit:
                raise RequestError(f"a batch of {number} {what} was asked for", expected=f"at most {limit}")
        self._device.make_current()
        state = self._free_states.pop() if self._free_states else self._new_state()
        scratch = (self._present_address, self._present.nbytes)
        batch = DeviceBatch(self, self._device, state, self._spec, rows, capacity, self._dtype, scratch)
        weakref.finalize(batch, self._free_states.append, state)
        return batch

    def encode(
        self, batch: Batch, input_ids: npt.NDArray[np.int32], input_length: npt.NDArray[np.int32], first: int = 0
    ) -> None:
        """Runs the encoder on R rows and commits the new tokens, as :meth:`Session.encode` says."""
        assert isinstance(batch, DeviceBatch), "a batch belongs to the session that made it"
        length = input_ids.shape[1]
        new_tokens = self._padded(length)
        cache = batch.cache
        cache.check_room(input_length, first)
        self._device.make_current()

        # The call begins with row ``first`` where its cache may be an engine's input. Otherwise the rows before it take
        # part with one token each, and nothing of that is kept.
        skipped = 0 if cache.may_begin_with(first) else first
        rows = slice(first - skipped, first + len(input_ids))
        count = rows.stop - rows.start
        arrays = self._encoder_inputs.arrays
        padded = arrays["input_ids"][: count * new_tokens].reshape(count, new_tokens)
        padded[:] = 0
        padded[skipped:, :length] = input_ids
        arrays["input_length"][:skipped] = 1
        arrays["input_length"][skipped:count] = input_length
        arrays["past_length"][:count] = cache.past_length[rows]
        self._encoder_inputs.upload("input_ids", "past_length")

        sizes = {**self._sizes(count), "new_tokens": new_tokens}
        self._set_shapes(self._encoder, "encoder", sizes)
        lengths = cast("npt.NDArray[np.int32]", arrays["input_length"])[:count]
        presents = cache.present_addresses(self._present_address, self._present, new_tokens, lengths, rows.start)
        for name, address in {**self._encoder_inputs.addresses, **cache.addresses(rows.start), **presents}.items():
            self._encoder.set_address(name, address)
        self._encoder.enqueue(self._device.stream)
        cache.append(self._present_address, self._present, new_tokens, input_length, first, skipped)
        self._device.synchronise()
        cache.past_length[first : rows.stop] += input_length
        self._unsaved = True

    def denoise(self, batch: Batch, first: int, last: int) -> None:
        """Runs one denoising step, as :meth:`Session.denoise` says: on rows 0 .. ``last``, whatever ``first`` is.

        There would be a graph for each pair of ``first`` and ``last`` otherwise, and rows converge at similar steps.
        """
        assert isinstance(batch, DeviceBatch), "a batch belongs to the session that made it"
        del first
        self._device.make_current()
        state, parity = batch.state, batch.parity
        step = cast("_Step | None", state.steps.get((last + 1, parity)))
        if step is None:
            step = state.steps[last + 1, parity] = self._new_step(state, last + 1, parity)
        state.inputs.upload(INPUTS[0], INPUTS[-1])
        self._run(step)
        state.download_step(parity)
        self._device.synchronise()
        batch.swap()
        if self._unsaved and (step.graph is not None or not self._use_graphs):
            # A step is captured when all its kernels are compiled; what the encoder compiled is saved along.
            self._unsaved = False
            for engine in self._engines.values():
                engine.save_kernels()

    def close(self) -> None:
        """Frees the memory of the GPU, as dropping the session does. Neither it nor its batches can be used then."""
        self._device.make_current()
        self._device.synchronise()
        self._free_states.clear()
        self._engines.clear()
        del self._encoder
        self._finalizer()

    def _run(self, step: _Step) -> None:
        """Enqueues a step: as it is the first time, when kernels are compiled and loaded, then as a graph."""
        if step.graph is None and step.was_run and self._use_graphs:
            self._capture(step)
        if step.graph is not None:
            self._device.replay(step.graph)
            return
        step.context.enqueue(self._device.stream)
        if not step.was_run:
            step.was_run = self._unsaved = True

    def _capture(self, step: _Step) -> None:
        """Captures a step, or gives up graphs for good and says so: without them it is slower, not wrong."""
        stream = self._device.stream
        problem = "the engine says that it cannot be captured"
        if step.context.is_capturable(stream):
            try:
                step.graph = self._device.capture(lambda: step.context.enqueue(stream))
                return
            except EngineError as error:
                problem = str(error)
        self._use_graphs = False
        warnings.warn(f"denoising steps run without a CUDA graph, which is slower: {problem}", RuntimeWarning, 2)

    def _new_step(self, state: DeviceState, rows: int, parity: int) -> _Step:
        context = self._new_context("denoiser")
        self._set_shapes(context, "denoiser", self._sizes(rows))
        for name, address in state.step_addresses(parity).items():
            context.set_address(name, address)
        return _Step(context)

    def _new_context(self, graph: GraphName) -> Context:
        """A context with the weights bound."""
        context = self._engines[graph].new_context(self._workspace)
        for tensor in self._engines[graph].table.weights:
            context.set_address(tensor.name, self._weights[tensor.name])
        return context

    def _new_state(self) -> DeviceState:
        return DeviceState(self._device, self._spec, self._max_batch, self._max_context, self._dtype)

    def _set_shapes(self, context: Context, graph: GraphName, sizes: Mapping[str, int]) -> None:
        for tensor in self._engines[graph].table.tensors:
            if tensor.mode == "input" and any(isinstance(axis, str) for axis in tensor.shape):
                context.set_shape(tensor.name, shapes_of(sizes, tensor.shape))

    def _sizes(self, rows: int) -> dict[str, int]:
        """Values of the contract's symbols, but for ``new_tokens``."""
        capacities = (self._spec.cache_capacity(layer, self._max_context) for layer in range(len(self._spec.layers)))
        return {"batch": rows, **{f"capacity_{layer}": capacity for layer, capacity in enumerate(capacities)}}

    def _padded(self, length: int) -> int:
        """Tokens of an encoder call that takes ``length`` of them; see :data:`MIN_NEW_TOKENS`."""
        if length > self._max_new_tokens:
            raise RequestError(
                f"an encoder call of {length} tokens was asked for", expected=f"at most {self._max_new_tokens}"
            )
        return min(max(MIN_NEW_TOKENS, 1 << (length - 1).bit_length()), self._max_new_tokens)

    def _check_memory(self, needed: Mapping[str, int]) -> None:
        """Refuses to start what cannot fit, naming all sizes: the last of many allocations would explain nothing."""
        free, total = self._device.memory()
        if sum(needed.values()) > free:
            sizes = ", ".join(f"{purpose} {nbytes / 1e9:.2f} GB" for purpose, nbytes in needed.items())
            raise EngineError(
                f"{self._device.name} has {free / 1e9:.2f} of {total / 1e9:.2f} GB free once the engines are loaded",
                expected=f"{sum(needed.values()) / 1e9:.2f} GB ({sizes})",
                fix="close what else uses the GPU, or build the bundle with a smaller --max-context or --max-batch",
            )


def _activation_dtype(table: EngineTable) -> EngineDType:
    for tensor in table.tensors:
        if tensor.name == "self_conditioning":
            if tensor.dtype not in ("bfloat16", "float16", "float32"):
                raise BundleError(
                    f"{table_file(table.graph)}: self_conditioning is {tensor.dtype}",
                    expected="bfloat16, float16 or float32",
                    fix="build the bundle again",
                )
            return tensor.dtype
    raise BundleError(f"{table_file(table.graph)}: self_conditioning is missing", fix="build the bundle again")


def _check_activations(table: EngineTable, dtype: str) -> None:
    """Refuses a table whose cache or self-conditioning is not what the recipe computes in."""
    for tensor in table.tensors:
        if tensor.name.startswith(("self_conditioning", "past_key_values.")) and tensor.dtype != dtype:
            raise BundleError(
                f"{table_file(table.graph)}: {tensor.name} is {tensor.dtype}",
                expected=f"{dtype}, which the recipe computes in",
                fix="build the bundle again",
            )


def _largest(table: EngineTable, name: str) -> tuple[int, ...]:
    """The largest shape that an input may have."""
    tensor = next(tensor for tensor in table.tensors if tensor.name == name)
    if tensor.profile is None:
        raise BundleError(f"{table_file(table.graph)}: {name} has no profile", fix="build the bundle again")
    return tensor.profile.max


def _check_table(
    graph: GraphName, table: EngineTable, spec: ModelSpec, dtype: EngineDType, max_context: int, max_batch: int
) -> None:
    """Compares an engine with the contract: addresses are bound, so a wrong shape would touch foreign memory."""
    found = {tensor.name: tensor for tensor in table.tensors if not tensor.parts}
    cache_dtype = cast("DType", dtype)
    wanted: list[tuple[str, TensorSpec]] = [
        *(("input", tensor) for tensor in graph_inputs(graph, spec, cache_dtype)),
        *(("output", tensor) for tensor in graph_outputs(graph, spec, cache_dtype)),
    ]
    odd = found.keys() ^ {tensor.name for _, tensor in wanted}
    if odd:
        raise BundleError(
            f"{table_file(graph)}: {sorted(odd)[0]} is {'unknown' if sorted(odd)[0] in found else 'missing'}",
            expected=f"the inputs and outputs of this model's {graph}",
            fix="build the bundle again with this version of dgcompile",
        )
    sizes = {
        "batch": max_batch,
        "new_tokens": max(ENCODE_CHUNK, spec.canvas_length),
        **{f"capacity_{layer}": spec.cache_capacity(layer, max_context) for layer in range(len(spec.layers))},
    }
    for mode, tensor in wanted:
        _check_tensor(table_file(graph), mode, found[tensor.name], tensor, sizes)


def _check_tensor(file: str, mode: str, found: EngineTensor, wanted: TensorSpec, sizes: Mapping[str, int]) -> None:
    if (found.mode, found.dtype, found.shape) != (mode, wanted.dtype, wanted.shape):
        raise BundleError(
            f"{file}: {wanted.name} is {found.mode} {found.dtype} {list(found.shape)}",
            expected=f"{mode} {wanted.dtype} {list(wanted.shape)}",
            fix="build the bundle again; a model runs only with the shapes it was trained with",
        )
    if mode == "output" or not any(isinstance(axis, str) for axis in wanted.shape):
        return
    needed = shapes_of(sizes, wanted.shape)
    largest = found.profile.max if found.profile else ()
    if len(largest) != len(needed) or any(have < need for have, need in zip(largest, needed, strict=True)):
        raise BundleError(
            f"{file}: {wanted.name} was built for shapes up to {list(largest)}",
            expected=f"at least {list(needed)}, for the manifest's max_context and max_batch",
            fix="build the bundle again",
        )
