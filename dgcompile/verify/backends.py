"""The engines of a GPU bundle against its own ONNX graphs in onnxruntime, through Polygraphy's Comparator.

This asks whether an engine computes what its graph says, on the machine that runs it; whether the graphs say what the
model does is the other question of ``verify``. The graphs run in float32 (see :mod:`.widen`), so what may differ is the
engine's bfloat16 arithmetic, and the bounds follow from it: see :func:`error_bound`. They need the memory of their
weights in float32 while they run.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

from dgcompile.bundle import Bundle
from dgcompile.contract import GRAPH_FILES, GraphName, graph_inputs, past_names, present_names
from dgcompile.engine_table import EngineTable
from dgcompile.errors import EngineError, MissingDependencyError, RequestError
from dgcompile.model_spec import ModelSpec
from dgcompile.progress import Progress
from dgcompile.runtime.device import Device, aligned
from dgcompile.runtime.device_batch import shapes_of
from dgcompile.runtime.loop import ENCODE_CHUNK
from dgcompile.runtime.random_numbers import RowRandom
from dgcompile.runtime.tensorrt_session import Engine

Array = npt.NDArray[Any]
Feed = dict[str, Array]

ROUNDINGS_PER_LAYER = 20
"""Roundings to bfloat16 on the way of the hidden states through a layer: four norms, about ten products, gating, RoPE,
two residual sums."""

MARGIN = 8
"""How far an error may exceed a random walk of its roundings: rounding errors are not quite independent, and a routing
decision that rounding turned over costs a token more than a rounding. PyTorch's own bfloat16 arithmetic reaches 4.5 on
the example (docs/numerics.md)."""

SAME_TOKENS = 0.98
"""Share of the positions that the reference is certain of at which an engine must have the same most probable token."""

CERTAIN_NATS = 0.1
"""Entropy below which a position counts as certain: the other tokens together have a probability of some percent."""


class OutputReport(BaseModel):
    """How far one output of one call was off.

    Attributes:
        call: which call, such as "denoiser step 2".
        output: name of the output.
        error: relative error, as root mean squares; for token ids and acceptance a share of positions, see
            :func:`compare_engines`.
        bound: what it may be.
    """

    model_config = ConfigDict(frozen=True)

    call: str
    output: str
    error: float
    bound: float

    @property
    def ok(self) -> bool:
        """Whether the error is within its bound."""
        return self.error <= self.bound


class BackendReport(BaseModel):
    """Result of :func:`compare_backends`."""

    model_config = ConfigDict(frozen=True)

    bundle: str
    backend: str
    outputs: tuple[OutputReport, ...]

    @property
    def ok(self) -> bool:
        """Whether every output is within its bound."""
        return all(output.ok for output in self.outputs)


def error_bound(spec: ModelSpec) -> float:
    """Relative error that bfloat16 arithmetic may leave in a model's results.

    Each rounding has a relative error of at most 2^-9; through L layers the errors add up like a random walk of
    :data:`ROUNDINGS_PER_LAYER` L steps, times :data:`MARGIN`.
    """
    return MARGIN * 2**-9 * math.sqrt(ROUNDINGS_PER_LAYER * spec.num_hidden_layers)


def compare_backends(path: str | Path, *, seed: int = 0, progress: Progress | None = None) -> BackendReport:
    """Runs a GPU bundle's engines and its graphs on the same inputs: two encoder calls, two denoising steps.

    Args:
        path: the bundle.
        seed: of the random prompt and canvas.
        progress: told of the calls.

    Raises:
        BundleError: the bundle is damaged or not for this machine.
        RequestError: a bundle of the cpu target, which has no engine beside its graphs.
        MissingDependencyError: Polygraphy or onnx is not installed.
        EngineError: one of the two failed.
    """
    progress = progress or Progress()
    bundle = Bundle.open(path, to_run=False, progress=progress)
    if bundle.target.backend == "onnxruntime":
        raise RequestError(
            f"{path} was built for target {bundle.target.name}, which runs its graphs as they are",
            expected="a bundle for a GPU",
            fix="compare it with its checkpoint: --against CHECKPOINT",
        )
    bundle = Bundle.open(path, progress=progress)
    from dgcompile.gpu import LIBRARY_EXTRAS, check_gpu
    from dgcompile.runtime.cuda_device import CudaDevice
    from dgcompile.runtime.tensorrt_engine import open_engines
    from dgcompile.runtime.weight_loading import load_weights, stored_weights

    target = bundle.target
    assert target.compute_capability is not None
    device = CudaDevice(check_gpu(target.compute_capability, target.backend), LIBRARY_EXTRAS[target.backend])
    try:
        engines = open_engines(bundle)
        stored = stored_weights([engine.table for engine in engines.values()], bundle.weights_file)
        weights = load_weights(device, stored, progress)
        outputs = compare_engines(bundle, device, engines, weights, seed=seed, progress=progress)
    finally:
        device.close()
    return BackendReport(bundle=str(path), backend=target.backend, outputs=outputs)


def compare_engines(
    bundle: Bundle,
    device: Device,
    engines: Mapping[GraphName, Engine],
    weights: Mapping[str, int],
    *,
    seed: int,
    progress: Progress,
) -> tuple[OutputReport, ...]:
    """The comparison itself; see :func:`compare_backends`.

    What is drawn and accepted follows rounding wherever the model is uncertain, so it is not compared with the
    reference: ``argmax_ids`` must agree where the reference is certain, ``accepted`` must follow from the engine's own
    entropies, and ``next_canvas_ids`` must hold the noise wherever the engine accepted nothing.

    Args:
        bundle: the graphs and their weights.
        device: where the engines run.
        engines: both.
        weights: addresses on the device of the weights that the engines take as inputs.
        seed: of prompt and canvas.
        progress: told of the calls.
    """
    spec = bundle.spec
    graphs = {graph: _reference(bundle, graph) for graph in GRAPH_FILES}
    # One call at a time: they can share it.
    workspace = device.allocate(max(engine.workspace_bytes for engine in engines.values()), "workspace")
    reports: list[OutputReport] = []
    with progress.task("compare with onnxruntime", 4, "calls") as advance:
        for call, graph, feed in _calls(bundle, graphs, seed):
            runner = EngineRunner(device, engines[graph], weights, workspace)
            reports.extend(_compare(call, graphs[graph], runner, feed, error_bound(spec)))
            advance()
    return tuple(reports)


def _reference(bundle: Bundle, graph: GraphName) -> Callable[[Feed], Feed]:
    """The graph in onnxruntime, as a function of its inputs."""
    try:
        import onnx
    except ImportError as error:
        raise _missing(error, bundle) from error
    import onnxruntime

    from dgcompile.verify.widen import widen

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.disable_prepacking", "1")
    # The widened graph exists in memory only; its weights lie in the bundle.
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(bundle.path.resolve()))
    model = widen(onnx.load(str(bundle.graph_file(graph)), load_external_data=False))
    # The card's own provider where onnxruntime-gpu is installed, in full float32.
    known = onnxruntime.get_available_providers()
    wanted: tuple[tuple[str, dict[str, str]], ...] = (
        ("CUDAExecutionProvider", {"use_tf32": "0"}),
        ("CPUExecutionProvider", {}),
    )
    session = onnxruntime.InferenceSession(
        model.SerializeToString(),
        options,
        providers=[provider for provider in wanted if provider[0] in known],
        disabled_optimizers=["ConstantFolding"],
    )
    names = [output.name for output in session.get_outputs()]

    def run(feed: Feed) -> Feed:
        return dict(zip(names, session.run(names, feed), strict=True))

    return run


def _missing(error: ImportError, bundle: Bundle) -> MissingDependencyError:
    from dgcompile.gpu import LIBRARY_EXTRAS

    extra = LIBRARY_EXTRAS[bundle.target.backend]
    return MissingDependencyError(
        f"the package {error.name!r} is not installed", fix=f"pip install 'dgcompile[{extra}]'"
    )


def _calls(
    bundle: Bundle, graphs: Mapping[GraphName, Callable[[Feed], Feed]], seed: int
) -> Iterator[tuple[str, GraphName, Feed]]:
    """The calls of a short generation as the reference goes through it: name, graph and inputs of each."""
    spec, max_context = bundle.spec, bundle.max_context
    rows = min(2, bundle.max_batch or 1)
    room = max_context - spec.canvas_length
    length = max(1, min(room // 2, spec.canvas_length, ENCODE_CHUNK))
    random = np.random.default_rng(seed)
    cache = {
        tensor.name: np.zeros(
            shapes_of({"batch": rows, **_capacities(spec, max_context)}, tensor.shape), dtype=np.float32
        )
        for tensor in graph_inputs("encoder", spec, "float32")
        if tensor.name.startswith("past_key_values.")
    }
    past = np.zeros(rows, dtype=np.int32)
    for part in (1, 2):
        # The second row is shorter, so that padding and different pasts are there.
        input_length = np.array([length, max(1, length - 3)][:rows], dtype=np.int32)
        if int(past.max()) + length > room:
            break
        feed: Feed = {
            "input_ids": random.integers(0, spec.vocab_size, (rows, length), dtype=np.int32),
            "input_length": input_length,
            "past_length": past.copy(),
            **{name: array.copy() for name, array in cache.items()},
        }
        yield f"encoder call {part}", "encoder", feed
        present = graphs["encoder"](feed)
        for layer in range(spec.num_hidden_layers):
            for past_name, present_name in zip(past_names(layer), present_names(layer), strict=True):
                ring = cache[past_name]
                for row in range(rows):
                    for offset in range(int(input_length[row])):
                        ring[row, (int(past[row]) + offset) % ring.shape[1]] = present[present_name][row, offset]
        past += input_length
    noise = [RowRandom(seed + row, spec.canvas_length, spec.vocab_size) for row in range(rows)]
    canvas = np.stack([row.initial_canvas(0) for row in noise])
    signal = np.zeros((rows, spec.canvas_length, spec.hidden_size), dtype=np.float32)
    for step in (1, 2):
        drawn = [row.step(0, step) for row in noise]
        feed = {
            "canvas_ids": canvas,
            "self_conditioning": signal,
            "past_length": past.copy(),
            "temperature": np.full(rows, bundle.generation.t_max, dtype=np.float32),
            "entropy_bound": np.full(rows, bundle.generation.entropy_bound, dtype=np.float32),
            "uniform": np.stack([uniform for uniform, _ in drawn]).astype(np.float32),
            "noise_ids": np.stack([ids for _, ids in drawn]).astype(np.int32),
            **cache,
        }
        yield f"denoiser step {step}", "denoiser", feed
        result = graphs["denoiser"](feed)
        canvas, signal = result["next_canvas_ids"], result["next_self_conditioning"]


def _capacities(spec: ModelSpec, max_context: int) -> dict[str, int]:
    return {f"capacity_{layer}": spec.cache_capacity(layer, max_context) for layer in range(spec.num_hidden_layers)}


class EngineRunner:
    """One run of an engine on host arrays; float arrays are float32 outside, whatever the engine computes in.

    Args:
        device: where it runs.
        engine: the engine.
        weights: addresses of its weights.
        workspace: address of the memory that it needs.
    """

    def __init__(self, device: Device, engine: Engine, weights: Mapping[str, int], workspace: int) -> None:
        self._device, self._engine, self._weights, self._workspace = device, engine, weights, workspace

    def run(self, feed: Feed) -> Feed:
        """Outputs by name.

        Raises:
            EngineError: the engine failed.
        """
        device, table = self._device, self._engine.table
        device.make_current()
        context = self._engine.new_context(self._workspace)
        sizes = _sizes(table, feed)
        results = {}
        for tensor in table.tensors:
            if tensor.parts:
                context.set_address(tensor.name, self._weights[tensor.name])
                continue
            shape = shapes_of(sizes, tensor.shape)
            packed = np.zeros(shape, dtype=_PACKED[tensor.dtype])
            if tensor.mode == "input":
                packed = _pack(feed[tensor.name], tensor.dtype).reshape(shape)
                if any(isinstance(axis, str) for axis in tensor.shape):
                    context.set_shape(tensor.name, shape)
            address = device.allocate(aligned(packed.nbytes), "comparison")
            host = device.allocate_host(packed.nbytes)
            host[:] = packed.reshape(-1).view(np.uint8)
            device.upload(address, host)
            device.synchronise()
            context.set_address(tensor.name, address)
            if tensor.mode == "output":
                results[tensor.name] = (address, packed)
        context.enqueue(device.stream)
        outputs = {}
        for tensor in table.tensors:
            if tensor.name in results:
                address, like = results[tensor.name]
                found = device.read(address, like.nbytes).view(like.dtype).reshape(like.shape)
                outputs[tensor.name] = _unpack(found, tensor.dtype)
        return outputs


_PACKED: Mapping[str, type[np.generic]] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,
    "int32": np.int32,
    "bool": np.bool_,
}


def _pack(array: Array, dtype: str) -> Array:
    """An array in the dtype of an engine; bfloat16 as its bits, rounded to nearest even."""
    if dtype != "bfloat16":
        return np.ascontiguousarray(array, dtype=_PACKED[dtype])
    bits = np.ascontiguousarray(array, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _unpack(array: Array, dtype: str) -> Array:
    if dtype == "bfloat16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32) if dtype == "float16" else array


def _sizes(table: EngineTable, feed: Feed) -> dict[str, int]:
    return {
        axis: size
        for tensor in table.tensors
        if tensor.name in feed
        for axis, size in zip(tensor.shape, feed[tensor.name].shape, strict=True)
        if isinstance(axis, str)
    }


@dataclass(frozen=True)
class _Compared:
    """What Polygraphy keeps of one output: true when it is within its bound."""

    report: OutputReport

    def __bool__(self) -> bool:
        return self.report.ok


def _compare(
    call: str, reference: Callable[[Feed], Feed], engine: EngineRunner, feed: Feed, bound: float
) -> Sequence[OutputReport]:
    """One call on both sides through Polygraphy's Comparator."""
    try:
        from polygraphy.backend.base import BaseRunner
        from polygraphy.comparator import Comparator
        from polygraphy.logger import G_LOGGER
    except ImportError as error:
        raise MissingDependencyError(
            f"the package {error.name!r} is not installed", fix="pip install polygraphy"
        ) from error

    class Runner(BaseRunner):  # type: ignore[misc]
        """A function from inputs to outputs."""

        def __init__(self, name: str, function: Callable[[Feed], Feed]) -> None:
            super().__init__(name=name)
            self._function = function

        def infer_impl(self, feed_dict: Feed) -> OrderedDict[str, Array]:
            self.inference_time = 0.0
            return OrderedDict(self._function(feed_dict))

        def get_input_metadata_impl(self) -> Any:
            from polygraphy.common import TensorMetadata

            metadata = TensorMetadata()
            for name, array in feed.items():
                metadata.add(name, array.dtype, array.shape)
            return metadata

    def compare(expected: Mapping[str, Array], found: Mapping[str, Array]) -> OrderedDict[str, _Compared]:
        wanted = {name: np.asarray(expected[name]) for name in expected}
        given = {name: np.asarray(found[name]) for name in expected}
        return OrderedDict((name, _Compared(_judge(call, name, wanted, given, feed, bound))) for name in wanted)

    with G_LOGGER.verbosity(G_LOGGER.CRITICAL):
        runs = Comparator.run(
            [Runner("onnxruntime", reference), Runner("engine", engine.run)], data_loader=[feed], warm_up=0
        )
        accuracy = Comparator.compare_accuracy(runs, compare_func=compare)
    # One result for each comparison function, by pair of runners, for each feed, by output.
    (by_pair,) = accuracy
    ((of_feed,),) = by_pair.values()
    return [compared.report for compared in of_feed.values()]


def _judge(call: str, name: str, wanted: Feed, given: Feed, feed: Feed, bound: float) -> OutputReport:
    """One output; what counts as its error is said at :func:`compare_engines`."""
    expected, found = wanted[name], given[name]
    if expected.shape != found.shape:
        raise EngineError(f"{call}: {name} has the shape {list(found.shape)}", expected=str(list(expected.shape)))
    if expected.dtype.kind == "f":
        size = float(np.sqrt(np.mean(np.square(expected, dtype=np.float64))))
        off = float(np.sqrt(np.mean(np.square(expected.astype(np.float64) - found))))
        # Certain positions have entropies near zero, whose relative error means nothing: at least CERTAIN_NATS.
        error = off / max(size, CERTAIN_NATS if name == "entropy" else 1e-30)
        return OutputReport(call=call, output=name, error=error if math.isfinite(error) else math.inf, bound=bound)
    if name == "argmax_ids":
        certain = wanted["entropy"] < CERTAIN_NATS
        wrong, bound = (expected != found)[certain], 1 - SAME_TOKENS
    elif name == "accepted":
        before = _entropy_before(given["entropy"].astype(np.float64))
        limit = feed["entropy_bound"][:, None].astype(np.float64)
        # Where the sum lies on the bound, its order of summing decides.
        decided = np.abs(before - limit) > 1e-3 * (1 + limit)
        wrong, bound = (found != (before <= limit))[decided], 0.0
    else:
        wrong, bound = (found != feed["noise_ids"])[~given["accepted"]], 0.0
    return OutputReport(call=call, output=name, error=float(wrong.mean()) if wrong.size else 0.0, bound=bound)


def _entropy_before(entropy: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """For each position the sum of the entropies of all more certain ones, [B, L]; see ``trace.sampler.accept``."""
    order = np.argsort(entropy, axis=1, kind="stable")
    ascending = np.take_along_axis(entropy, order, axis=1)
    before = np.zeros_like(entropy)
    np.put_along_axis(before, order, np.cumsum(ascending, axis=1) - ascending, axis=1)
    return before
