"""The process that builds one engine: ``python -m dgcompile.build.tensorrt.worker``.

A process of its own, because the library needs an environment that must be there before a process starts (see
``libraries.py``), because it ends the process where others raise, and because its memory goes back with it.

The job comes as one JSON line on stdin. Events go out as JSON lines on stdout; what libraries print there goes to
stderr.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import json
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from dgcompile.contract import GRAPH_FILES, GraphName
from dgcompile.engine_table import EngineDType, EngineTable
from dgcompile.errors import DgcompileError, EngineError

Emit = Callable[[dict[str, Any]], None]

LAYERS_BEGIN = ("Layers:", "Engine Layer Information:")
"""How the message begins that lists the finished engine's layers, which the builder writes at VERBOSE."""

WORKSPACE = re.compile(r"Total Activation Memory: (\d+)")
"""The message that says how much device memory a run of the engine needs, in bytes."""

BUNDLE_LINK = "bundle"
"""Link in the folder that a worker is started in."""


@dataclass(frozen=True)
class EngineJob:
    """What a worker is given. All names are relative to the bundle, to which :data:`BUNDLE_LINK` leads.

    Attributes:
        backend: the library's Python package, "tensorrt_rtx" or "tensorrt".
        graph: which engine.
        table: the engine's tensors, as JSON.
        kernels: folder of the bundle's kernels.
        sm: compute capability, such as 120.
        multiprocessors: of the GPU.
        engine, layers: files to write; the parent gives them their final names.
        parent: process id of who started the worker, ten digits: it ends with that.
    """

    backend: str
    graph: GraphName
    table: str
    kernels: str
    sm: int
    multiprocessors: int
    engine: str
    layers: str
    parent: str


_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>
_SAME_ADDRESSES = 0x0040000  # ADDR_NO_RANDOMIZE of <sys/personality.h>
_NEVER = 1e6  # seconds after which Python makes a thread yield to a waiting one


def _fix_addresses() -> None:
    """Starts this process again with the same memory addresses as every other time.

    TensorRT-RTX writes some lists of an engine in the order of memory addresses: otherwise, two builds of one graph are
    equal engines of different bytes. Where the system refuses (containers may), they stay so. What the process did
    before must not matter either, down to whether Python found compiled modules: hence the thread, whose memory
    glibc takes from an arena that nothing has used.
    """
    personality = getattr(ctypes.CDLL(None, use_errno=True), "personality", None)
    if personality is None:
        return
    # TensorRT's own threads take and free memory too: on one processor they do not run beside one another.
    usable = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {usable[os.getpid() % len(usable)]})
    current = personality(0xFFFFFFFF)
    if current < 0 or current & _SAME_ADDRESSES or personality(current | _SAME_ADDRESSES) < 0:
        return
    os.execv(sys.executable, [sys.executable, "-m", __spec__.name])


def main() -> None:
    """Entry point of the process."""
    _fix_addresses()
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def emit(event: dict[str, Any]) -> None:
        events.write(json.dumps(event) + "\n")

    job = EngineJob(**json.loads(sys.stdin.readline()))
    _end_with_parent(int(job.parent))
    _import_libraries(job)
    _in_fresh_thread(lambda: _work(job, emit))
    events.flush()
    # TensorRT's objects and Python's end in an order that has crashed; everything is written.
    sys.stderr.flush()
    os._exit(0)


def _in_fresh_thread(work: Callable[[], None]) -> None:
    """Runs ``work`` in a thread whose memory comes from a fresh arena, see :func:`_fix_addresses`, and waits for it.

    This thread must not run beside the other one: Python's objects share one heap, and where they lie decides in which
    order TensorRT's bindings free memory. Thread.start() and join() would take and free some at a moment that the
    scheduler chooses (seen to change engines). So this thread waits for a bare lock, and keeps the interpreter's lock
    until it does.
    """
    done = _thread.allocate_lock()
    done.acquire()

    def run() -> None:
        try:
            work()
        finally:
            done.release()

    sys.setswitchinterval(_NEVER)
    _thread.start_new_thread(run, ())
    done.acquire()


def _import_libraries(job: EngineJob) -> None:
    """What a build imports, so that the building thread imports nothing."""
    for module in (job.backend, "dgcompile.build.tensorrt.graph", "dgcompile.plugins.adapter"):
        with contextlib.suppress(ImportError):  # said again, and better, where it is needed
            import_module(module)


def _work(job: EngineJob, emit: Emit) -> None:
    """Builds, and says how it ended."""
    try:
        emit({"event": "done", **_build(job, emit)})
    except DgcompileError as error:
        emit({"event": "error", "problem": error.problem, "expected": error.expected, "fix": error.fix})
    except OSError as error:
        emit({"event": "os error", "errno": error.errno, "text": error.strerror or str(error)})
    except Exception as error:
        traceback.print_exc()
        emit({"event": "error", "problem": f"{type(error).__name__}: {error}", "expected": None, "fix": None})


def _end_with_parent(parent: int) -> None:
    """Has the system end this process when its parent ends; no thread waits for that, see :func:`_fix_addresses`."""
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _build(job: EngineJob, emit: Emit) -> dict[str, Any]:
    # Before the library loads anything: numpy and onnx, then the library, then the plugins that subclass its classes.
    from dgcompile.build.tensorrt.graph import engine_graph
    from dgcompile.plugins.adapter import register_plugins
    from dgcompile.plugins.kernel_library import KernelLibrary

    trt = import_module(job.backend)
    bundle = Path(BUNDLE_LINK)
    path = bundle / GRAPH_FILES[job.graph]
    model, _ = engine_graph(path)
    table = EngineTable.model_validate_json(job.table)

    logger = _logger(trt)
    builder = trt.Builder(logger)
    plugins = register_plugins(trt, KernelLibrary.open(bundle / job.kernels, job.sm), job.multiprocessors)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    parsed = parser.parse(model.SerializeToString(), str(path))
    plugins.check()
    if not parsed:
        problems = [_parser_problem(parser.get_error(index)) for index in range(parser.num_errors)]
        raise EngineError(f"{path.name}: {job.backend} {trt.__version__} cannot take it: {'; '.join(problems)}")
    _check_network(trt, network, table, path.name)

    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if job.backend == "tensorrt_rtx":
        # Only this library can build for a GPU that is not here.
        config.num_compute_capabilities = 1
        config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{job.sm}"), 0)
    config.add_optimization_profile(_profile(builder, table))
    config.progress_monitor = _monitor(trt, emit)

    with (bundle / job.engine).open("wb") as file:
        writer = _writer(trt, file)
        built = builder.build_serialized_network_to_stream(network, config, writer)
        if built and not writer.written:
            # Bindings that do not fit the library exactly have been seen to call something else here.
            content = builder.build_serialized_network(network, config)
            built = content is not None and writer.write(memoryview(content)) > 0
        file.flush()
        os.fsync(file.fileno())
    plugins.check()
    if not built:
        raise EngineError(f"{job.backend} {trt.__version__} could not build the {job.graph}: {logger.last_error}")
    layers = logger.layers or _inspected(trt, logger, job)
    (bundle / job.layers).write_text(layers.rstrip("\n") + "\n", encoding="utf-8")
    return {"version": trt.__version__, "workspace_bytes": logger.workspace_bytes}


def _inspected(trt: Any, logger: Any, job: EngineJob) -> str:
    """The list of layers as the finished engine tells it, which takes the GPU that it was built for.

    Raises:
        EngineError: it cannot be loaded here.
    """
    engine = trt.Runtime(logger).deserialize_cuda_engine((Path(BUNDLE_LINK) / job.engine).read_bytes())
    if engine is None:
        raise EngineError(f"{job.backend} {trt.__version__} did not say what layers the {job.graph} has")
    return str(engine.create_engine_inspector().get_engine_information(trt.LayerInformationFormat.JSON))


def _logger(trt: Any) -> Any:
    class Logger(trt.ILogger):  # type: ignore[misc]
        """Keeps what it says of the engine; prints warnings to stderr, which the parent shows on failure."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.layers = ""
            self.workspace_bytes: int | None = None
            self.last_error = "it gave no reason"

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                self.last_error = " ".join(message.split())
            if severity not in (trt.ILogger.Severity.VERBOSE, trt.ILogger.Severity.INFO):
                print(message, file=sys.stderr, flush=True)
            elif message.startswith(LAYERS_BEGIN):
                self.layers = message
            elif said := WORKSPACE.match(message):
                self.workspace_bytes = int(said[1])

    return Logger()


def _monitor(trt: Any, emit: Emit) -> Any:
    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        """Passes on how far the builder got."""

        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            emit({"event": "phase", "name": phase_name, "parent": parent_phase, "steps": num_steps})

        def phase_finish(self, phase_name: str) -> None:
            emit({"event": "finish", "name": phase_name})

        def step_complete(self, phase_name: str, step: int) -> bool:
            emit({"event": "step", "name": phase_name, "step": step})
            return True

    return Monitor()


def _writer(trt: Any, file: Any) -> Any:
    class Writer(trt.IStreamWriter):  # type: ignore[misc]
        """Writes the engine piece by piece, so that it is never in memory as a whole."""

        def __init__(self) -> None:
            trt.IStreamWriter.__init__(self)
            self.written = 0

        def write(self, data: Any) -> int:
            count = int(file.write(data))
            self.written += count
            return count

    return Writer()


def _profile(builder: Any, table: EngineTable) -> Any:
    profile = builder.create_optimization_profile()
    for tensor in table.tensors:
        if tensor.profile is not None:
            profile.set_shape(tensor.name, tensor.profile.min, tensor.profile.opt, tensor.profile.max)
    return profile


def _check_network(trt: Any, network: Any, table: EngineTable, name: str) -> None:
    """Compares what was parsed with what sessions will bind by address."""
    names: dict[Any, EngineDType] = {
        trt.float32: "float32",
        trt.float16: "float16",
        trt.bfloat16: "bfloat16",
        trt.fp8: "float8e4m3fn",
        trt.int8: "int8",
        trt.int32: "int32",
        trt.bool: "bool",
    }
    found = {
        tensor.name: (mode, names.get(tensor.dtype), tuple(tensor.shape))
        for mode, count, get in (
            ("input", network.num_inputs, network.get_input),
            ("output", network.num_outputs, network.get_output),
        )
        for tensor in (get(index) for index in range(count))
    }
    unknown = sorted(set(found) ^ {tensor.name for tensor in table.tensors})
    if unknown:
        raise EngineError(f"{name}: {unknown[0]} is in only one of the network and the table of its tensors")
    for tensor in table.tensors:
        mode, dtype, shape = found[tensor.name]
        same_shape = len(shape) == len(tensor.shape) and all(
            isinstance(wanted, str) or actual in (wanted, -1)
            for actual, wanted in zip(shape, tensor.shape, strict=False)
        )
        if mode != tensor.mode or dtype != tensor.dtype or not same_shape:
            raise EngineError(
                f"{name}: {tensor.name} became {mode} {dtype} {list(shape)}",
                expected=f"{tensor.mode} {tensor.dtype} {list(tensor.shape)}",
            )


def _parser_problem(error: Any) -> str:
    place = f"node {error.node_name()} ({error.node_operator()})" if error.node_operator() else "the graph"
    return f"{place}: {' '.join(error.desc().split())}"


if __name__ == "__main__":
    main()
