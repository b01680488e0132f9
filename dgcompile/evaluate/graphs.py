"""A bundle's two graphs in onnxruntime, in float32 on the CPU, with the values inside them that are asked for.

The graphs on disk stay as they are: copies in memory get the wanted values as further outputs and point to the weights
in the bundle. A graph for a GPU is widened to float32 first (see :mod:`dgcompile.verify.widen`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime

from dgcompile.bundle import GENERATION_CONFIG_FILE, Bundle, Manifest, StageName, check_files
from dgcompile.contract import GRAPH_FILES, GraphName, past_names, present_names
from dgcompile.errors import BundleError, EngineError, RequestError
from dgcompile.evaluate.metrics import LOGITS, hidden_states_name
from dgcompile.generation_config import GenerationConfig
from dgcompile.model_spec import ModelSpec
from dgcompile.progress import Progress
from dgcompile.runtime.kv_cache import KVCache
from dgcompile.runtime.session import Batch, HostBatch
from dgcompile.verify.widen import widen

Array = npt.NDArray[Any]

_FOR_GPUS: frozenset[StageName] = frozenset({"kernels", "engine"})
"""Stages of GPU targets that graphs do without."""


def open_graphs(path: str | Path, progress: Progress | None = None) -> Bundle:
    """Opens a bundle for its graphs: engines and kernels may be missing, or be for another machine.

    Raises:
        BundleError: it is missing, damaged or malformed, or its graphs are not finished.
    """
    folder = Path(path)
    manifest = Manifest.read(folder)
    on_gpu = manifest.target.backend != "onnxruntime"
    unfinished = [stage for stage in manifest.unfinished if not on_gpu or stage not in _FOR_GPUS]
    lacking = [name for name in GRAPH_FILES.values() if name not in manifest.files]
    if unfinished or lacking:
        what = f"stage {unfinished[0]} is to be done" if unfinished else f"{lacking[0]} is not recorded"
        raise BundleError(
            f"{folder}: the build is unfinished ({what})",
            fix="run the same `dgcompile build` command again: it goes on where it stopped",
        )
    used = {name: record for name, record in manifest.files.items() if "/" not in name}
    check_files(folder, used, progress=progress)
    generation = GenerationConfig.from_file(folder / GENERATION_CONFIG_FILE, error=BundleError)
    return Bundle(path=folder, manifest=manifest, generation=generation)


class GraphSession:
    """The graphs as a session of the generation loop. Batches are host memory in float32.

    Args:
        bundle: opened with :func:`open_graphs`.
        threads: threads of each call; None leaves the choice to onnxruntime.

    Raises:
        BundleError: the graphs do not name the values that an evaluation needs.
        EngineError: onnxruntime cannot load a graph.
        RequestError: ``threads`` is below 1.
    """

    def __init__(self, bundle: Bundle, threads: int | None = None) -> None:
        if threads is not None and threads < 1:
            raise RequestError(f"the number of threads is {threads}", expected="at least 1")
        self._spec = bundle.spec
        self._max_context = bundle.max_context
        self.layer_names = tuple(hidden_states_name(layer) for layer in range(bundle.spec.num_hidden_layers))
        wanted: Mapping[GraphName, Sequence[str]] = {"encoder": (), "denoiser": (LOGITS, *self.layer_names)}
        self._engines = {graph: _load(bundle, graph, names, threads) for graph, names in wanted.items()}

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
        return HostBatch(self._spec, KVCache(self._spec, rows, capacity, np.float32), np.float32)

    def encode(
        self, batch: Batch, input_ids: npt.NDArray[np.int32], input_length: npt.NDArray[np.int32], first: int = 0
    ) -> None:
        """Runs the encoder on R rows and commits the new tokens, as ``Session.encode`` says."""
        assert isinstance(batch, HostBatch), "a batch belongs to the session that made it"
        rows = slice(first, first + len(input_ids))
        feed = {
            "input_ids": input_ids,
            "input_length": input_length,
            "past_length": batch.cache.past_length[rows],
            **_past_inputs(batch.cache, rows),
        }
        names = [present_names(layer) for layer in range(self._spec.num_hidden_layers)]
        present = self._run("encoder", [name for pair in names for name in pair], feed)
        keys, values = ([present[name] for name in column] for column in zip(*names, strict=True))
        batch.cache.append(keys, values, input_length, first)

    def denoise(self, batch: Batch, first: int, last: int) -> None:
        """Runs one denoising step on rows ``first`` .. ``last``, as ``Session.denoise`` says."""
        self.step(batch, first, last, ())

    def step(self, batch: Batch, first: int, last: int, inside: Sequence[str]) -> dict[str, Array]:
        """Like :meth:`denoise`; returns values inside the graph, float32, for these rows.

        Args:
            batch: the rows.
            first, last: which of them, inclusive.
            inside: names of the values: "logits" or ``layer_names``.
        """
        assert isinstance(batch, HostBatch), "a batch belongs to the session that made it"
        rows = slice(first, last + 1)
        feed = {
            "canvas_ids": batch.canvas_ids[rows],
            "self_conditioning": batch.self_conditioning[rows],
            "past_length": batch.cache.past_length[rows],
            "temperature": batch.temperature[rows],
            "entropy_bound": batch.entropy_bound[rows],
            "uniform": batch.uniform[rows],
            "noise_ids": batch.noise_ids[rows],
            **_past_inputs(batch.cache, rows),
        }
        results: dict[str, Array] = {
            "next_canvas_ids": batch.next_canvas_ids,
            "next_self_conditioning": batch.next_self_conditioning,
            "argmax_ids": batch.argmax_ids,
            "accepted": batch.accepted,
            "entropy": batch.entropy,
        }
        outputs = self._run("denoiser", [*results, *inside], feed)
        for name, buffer in results.items():
            buffer[rows] = outputs[name]
        batch.swap()
        return {name: outputs[name] for name in inside}

    def _run(self, graph: GraphName, names: Sequence[str], feed: Mapping[str, Array]) -> dict[str, Array]:
        contiguous = {name: np.ascontiguousarray(array) for name, array in feed.items()}
        try:
            found = self._engines[graph].run(list(names), contiguous)
        except Exception as error:  # onnxruntime's exceptions have no common base
            raise EngineError(f"{GRAPH_FILES[graph]}: onnxruntime failed while running it: {error}") from error
        return dict(zip(names, found, strict=True))


def _past_inputs(cache: KVCache, rows: slice) -> dict[str, Array]:
    return {
        name: ring[rows]
        for layer, rings in enumerate(zip(cache.keys, cache.values, strict=True))
        for name, ring in zip(past_names(layer), rings, strict=True)
    }


def _load(bundle: Bundle, graph: GraphName, inside: Sequence[str], threads: int | None) -> Any:
    file = bundle.graph_file(graph)
    try:
        model = onnx.load(str(file), load_external_data=False)
    except Exception as error:  # protobuf's, which has several
        raise BundleError(f"{file} cannot be read: {error}", fix="build the bundle again") from error
    if bundle.recipe.activation_dtype != "float32":
        model = widen(model)
    made = {output for node in model.graph.node for output in node.output}
    for name in inside:
        if name not in made:
            raise BundleError(
                f"{file} has no value named {name}",
                expected="a graph that names its logits and the outputs of its layers",
                fix="build the bundle again with this version of dgcompile",
            )
        model.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads or 0
    # As in the runtime's own session: the weights stay mapped from the file, and no shape is remembered.
    options.add_session_config_entry("session.disable_prepacking", "1")
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(bundle.path.resolve()))
    options.enable_mem_pattern = False
    try:
        return onnxruntime.InferenceSession(
            model.SerializeToString(),
            options,
            providers=["CPUExecutionProvider"],
            disabled_optimizers=["ConstantFolding"],
        )
    except Exception as error:  # onnxruntime's exceptions have no common base
        raise EngineError(
            f"{file}: onnxruntime {onnxruntime.__version__} cannot load it: {error}", fix="build the bundle again"
        ) from error
