"""One loaded engine of TensorRT-RTX (``tensorrt_rtx``) or TensorRT (``tensorrt``), whose Python APIs hardly differ.

The library's module is passed around as a value, so nothing here imports either.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from dgcompile.bundle import Bundle, kernels_folder
from dgcompile.contract import GRAPH_FILES, GraphName
from dgcompile.engine_table import EngineDType, EngineTable, engine_file, table_file
from dgcompile.errors import BundleError, EngineError
from dgcompile.files import write_atomically
from dgcompile.gpu import import_library
from dgcompile.progress import Progress

CACHE_FOLDER = "cache"
"""Folder in a bundle where TensorRT-RTX's kernels for this machine are kept. No file of it is in the manifest: whoever
reads one must be content with garbage. It may be removed at any time."""

_MAX_CACHE_BYTES = 1 << 30
_LAST_MESSAGES = 5
_DTYPES: Mapping[EngineDType, str] = {
    "float32": "FLOAT",
    "float16": "HALF",
    "bfloat16": "BF16",
    "float8e4m3fn": "FP8",
    "int8": "INT8",
    "int32": "INT32",
    "bool": "BOOL",
}


class _Registration(Protocol):
    """What registering the plugins gives: it knows what went wrong inside their callbacks."""

    def check(self) -> None:
        """Raises EngineError when a callback failed."""


class TensorRTEngine:
    """A deserialised engine.

    Args:
        trt: the library.
        runtime: its ``Runtime``.
        logger: what ``runtime`` logs to.
        plugins: the registered plugins; kept alive as long as the engine.
        file: the engine.
        table: its tensors.
        cache: file in which TensorRT-RTX's kernels for this machine are kept; read if it is there.

    Raises:
        EngineError: the library refuses the engine, or its tensors are not those of the table.
    """

    def __init__(
        self,
        trt: ModuleType,
        runtime: Any,
        logger: Any,
        plugins: _Registration,
        file: Path,
        table: EngineTable,
        cache: Path,
    ) -> None:
        self.table = table
        self._trt, self._runtime, self._logger, self._plugins = trt, runtime, logger, plugins
        self._file, self._cache_file = file, cache
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
            # The library copies what it needs to the GPU: mapped, the file never lies in memory as a whole.
            self._engine = runtime.deserialize_cuda_engine(content)
        self._plugins.check()
        if self._engine is None:
            raise EngineError(
                f"{file}: {trt.__name__} {trt.__version__} refuses it: {logger.said()}",
                fix="build the bundle again on this machine",
            )
        self._check_tensors()
        self._config = self._engine.create_runtime_config()
        self._config.set_execution_context_allocation_strategy(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        self._cache: Any = None
        if hasattr(self._config, "create_runtime_cache"):
            self._prepare_compilation()

    @property
    def workspace_bytes(self) -> int:
        """Device memory that a run needs, whatever the shapes."""
        return int(self._engine.device_memory_size_v2)

    def new_context(self, workspace: int) -> TensorRTContext:
        """What runs the engine with one set of shapes and addresses.

        Args:
            workspace: address of :attr:`workspace_bytes` of device memory. Runs that follow one another may share it.

        Raises:
            EngineError: the library refuses.
        """
        context = self._engine.create_execution_context(self._config)
        if context is None:
            raise EngineError(f"{self._file}: no execution context: {self._logger.said()}")
        context.set_device_memory(workspace, self.workspace_bytes)
        return TensorRTContext(context, self._file.name, self._logger, self._plugins)

    def save_kernels(self) -> None:
        """Keeps the kernels that were compiled on this machine, so that the next start need not compile them again.

        Where the bundle cannot be written to, they are compiled at every start.
        """
        if self._cache is None:
            return
        folder = self._cache_file.parent
        with contextlib.suppress(OSError):
            if folder.is_symlink():
                return
            folder.mkdir(exist_ok=True)
            write_atomically(self._cache_file, bytes(self._cache.serialize()))

    def _prepare_compilation(self) -> None:
        """Tells TensorRT-RTX how to compile on this machine, and gives it what it compiled before."""
        trt, config = self._trt, self._config
        # A graph replays the kernels that it captured: they must be the final ones, not those of a first attempt.
        config.dynamic_shapes_kernel_specialization_strategy = trt.DynamicShapesKernelSpecializationStrategy.EAGER
        config.cuda_graph_strategy = trt.CudaGraphStrategy.DISABLED
        self._cache = config.create_runtime_cache()
        with contextlib.suppress(OSError):
            found = self._cache_file.lstat()
            regular = os.path.isfile(self._cache_file) and not self._cache_file.is_symlink()  # noqa: PTH113
            if regular and not self._cache_file.parent.is_symlink() and 0 < found.st_size <= _MAX_CACHE_BYTES:
                # False for the cache of another machine, driver or version: it is replaced after the first run.
                self._cache.deserialize(self._cache_file.read_bytes())
        config.set_runtime_cache(self._cache)

    def _check_tensors(self) -> None:
        """Compares the engine with its table: addresses are bound by the table, so it must tell the truth."""
        engine, trt = self._engine, self._trt
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        wanted = {tensor.name: tensor for tensor in self.table.tensors}
        odd = set(names) ^ set(wanted)
        if odd:
            raise EngineError(
                f"{self._file}: {sorted(odd)[0]} is in only one of it and {table_file(self.table.graph)}",
                fix="build the bundle again with --overwrite",
            )
        for name, tensor in wanted.items():
            dtype = engine.get_tensor_dtype(name).name
            shape = tuple(engine.get_tensor_shape(name))
            is_input = engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
            expected_shape = tuple(axis if isinstance(axis, int) else -1 for axis in tensor.shape)
            if (dtype, is_input) != (_DTYPES[tensor.dtype], tensor.mode == "input") or not _fits(shape, expected_shape):
                raise EngineError(
                    f"{self._file}: tensor {name} is {dtype} {list(shape)}",
                    expected=f"{tensor.mode} {_DTYPES[tensor.dtype]} {list(expected_shape)}",
                    fix="build the bundle again with --overwrite",
                )


def _fits(shape: Sequence[int], expected: Sequence[int]) -> bool:
    """Whether an engine's shape is the expected one; -1 stands for what is known only when it runs."""
    return len(shape) == len(expected) and all(
        found == wanted or -1 in (found, wanted) for found, wanted in zip(shape, expected, strict=True)
    )


class TensorRTContext:
    """An execution context. A graph captured from it stays valid only while shapes and addresses stay as they are."""

    def __init__(self, context: Any, name: str, logger: Any, plugins: _Registration) -> None:
        self._context, self._name, self._logger, self._plugins = context, name, logger, plugins

    def set_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Sets the shape of an input."""
        if not self._context.set_input_shape(name, shape):
            raise EngineError(f"{self._name}: {name} cannot have the shape {list(shape)}: {self._logger.said()}")

    def set_address(self, name: str, address: int) -> None:
        """Sets where an input or output lies."""
        if not self._context.set_tensor_address(name, address):
            raise EngineError(f"{self._name}: {name} cannot lie at {address:#x}: {self._logger.said()}")

    def enqueue(self, stream: int) -> None:
        """Enqueues one run on a stream."""
        done = self._context.execute_async_v3(stream)
        self._plugins.check()
        if not done:
            raise EngineError(f"{self._name} failed to run: {self._logger.said()}")

    def is_capturable(self, stream: int) -> bool:
        """Whether a run can be captured as a graph; TensorRT says so only by failing."""
        ask = getattr(self._context, "is_stream_capturable", None)
        return True if ask is None else bool(ask(stream))


def open_engines(bundle: Bundle, progress: Progress | None = None) -> dict[GraphName, TensorRTEngine]:
    """Loads both engines of a bundle onto the current GPU.

    Args:
        bundle: for a GPU target; a context of the GPU must be current.
        progress: told the bytes of each engine when it is loaded.

    Raises:
        MissingDependencyError: the library is not installed.
        BundleError: it has another version than the one that built the engines, or a table or kernel is unusable.
        EngineError: the library refuses an engine.
    """
    from dgcompile.plugins.adapter import register_plugins
    from dgcompile.plugins.kernel_library import KernelLibrary

    target, engine = bundle.target, bundle.manifest.engine
    assert engine is not None and target.multiprocessors is not None
    tables = {graph: EngineTable.read(bundle.path / table_file(graph)) for graph in GRAPH_FILES}
    for graph, table in tables.items():
        if table.graph != graph:
            raise BundleError(f"{bundle.path / table_file(graph)} is of the {table.graph}", expected=f"the {graph}")
    trt = import_library(target.backend, engine.version)
    logger = _logger(trt)
    runtime = trt.Runtime(logger)
    # The multiprocessors that the engines were built for, not this card's: sizes of workspaces are in the engines.
    plugins = register_plugins(
        trt, KernelLibrary.open(bundle.path / kernels_folder(target), target.sm), target.multiprocessors
    )
    files = {graph: bundle.path / engine_file(graph) for graph in tables}
    sizes = {graph: file.stat().st_size for graph, file in files.items()}
    engines: dict[GraphName, TensorRTEngine] = {}
    with (progress or Progress()).task("load engines", sum(sizes.values()), "bytes") as advance:
        for graph, table in tables.items():
            cache = bundle.path / CACHE_FOLDER / f"{graph}.kernels"
            engines[graph] = TensorRTEngine(trt, runtime, logger, plugins, files[graph], table, cache)
            advance(sizes[graph])
    return engines


def _logger(trt: Any) -> Any:
    """A logger that keeps the last problems for the message of an error."""

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self._problems: deque[str] = deque(maxlen=_LAST_MESSAGES)

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR, trt.ILogger.WARNING):
                self._problems.append(" ".join(message.split()))

        def said(self) -> str:
            """The last problems, which are then forgotten."""
            text = "; ".join(self._problems) or "it did not say why"
            self._problems.clear()
            return text

    return Logger()
