"""A device and engines of host memory, with the rules of a GPU, so that the GPU session can be tested without one.

What is enqueued runs only when somebody waits. Memory holds NaN until it is written; addresses outside it are errors.
A graph replays what was captured, with the addresses of the capture, and is refused once its context was changed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime

from dgcompile.engine_table import EngineTable, EngineTensor
from dgcompile.recipe import weight_class
from dgcompile.runtime.device import ALIGNMENT, HostBuffer
from dgcompile.runtime.onnxruntime_session import session_options

STREAM = 77
NUMPY: dict[str, type[np.generic]] = {"float32": np.float32, "int32": np.int32, "bool": np.bool_, "float16": np.float16}


class HostDevice:
    """A device whose memory is host memory.

    Args:
        free: bytes that it says are free.

    Attributes:
        allocated: bytes by purpose.
        counts: how often each kind of work was done.
    """

    name = "Host GPU"
    stream = STREAM

    def __init__(self, free: int = 1 << 40) -> None:
        self._free = free
        self._memory: list[tuple[int, npt.NDArray[np.uint8]]] = []
        self._pinned: list[tuple[int, int]] = []
        self._queue: list[Callable[[], None]] = []
        self._captured: list[Callable[[], None]] | None = None
        self.allocated: dict[str, int] = {}
        self.counts = dict.fromkeys(("upload", "download", "copy", "replay", "capture", "synchronise", "engine"), 0)
        self.closed = False

    def make_current(self) -> None:
        assert not self.closed

    def memory(self) -> tuple[int, int]:
        return self._free, 2 * self._free

    def allocate(self, nbytes: int, purpose: str) -> int:
        self.allocated[purpose] = self.allocated.get(purpose, 0) + nbytes
        buffer = np.full(nbytes + ALIGNMENT, 0xFF, dtype=np.uint8)
        address = -(-buffer.ctypes.data // ALIGNMENT) * ALIGNMENT
        start = address - buffer.ctypes.data
        self._memory.append((address, buffer[start : start + nbytes]))
        return address

    def view(self, address: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Device memory from an address on."""
        for begin, buffer in self._memory:
            if begin <= address and address + nbytes <= begin + len(buffer):
                return buffer[address - begin :][:nbytes]
        raise AssertionError(f"{nbytes} bytes at {address:#x} are not all in one allocation")

    def allocate_host(self, nbytes: int) -> HostBuffer:
        buffer = np.zeros(nbytes, dtype=np.uint8)
        self._pinned.append((buffer.ctypes.data, nbytes))
        return buffer

    def _check_pinned(self, buffer: HostBuffer) -> None:
        begin = buffer.ctypes.data
        assert any(start <= begin and begin + len(buffer) <= start + size for start, size in self._pinned)

    def submit(self, work: Callable[[], None]) -> None:
        (self._queue if self._captured is None else self._captured).append(work)

    def upload(self, target: int, source: HostBuffer) -> None:
        self._check_pinned(source)
        self.counts["upload"] += 1
        to = self.view(target, len(source))
        self.submit(lambda: np.copyto(to, source))

    def download(self, target: HostBuffer, source: int) -> None:
        self._check_pinned(target)
        self.counts["download"] += 1
        origin = self.view(source, len(target))
        self.submit(lambda: np.copyto(target, origin))

    def copy(self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, height: int = 1) -> None:
        self.counts["copy"] += 1
        assert width <= min(target_pitch, source_pitch)
        pairs = [
            (self.view(target + row * target_pitch, width), self.view(source + row * source_pitch, width))
            for row in range(height)
        ]

        def work() -> None:
            for to, origin in pairs:
                assert not np.shares_memory(to, origin)
                np.copyto(to, origin)

        self.submit(work)

    def read(self, address: int, nbytes: int) -> HostBuffer:
        self.synchronise()
        return self.view(address, nbytes).copy()

    def zero(self, address: int, nbytes: int) -> None:
        self.submit(lambda: self.view(address, nbytes).fill(0))

    def record(self) -> object:
        done: list[bool] = []
        self.submit(lambda: done.append(True))
        return done

    def wait(self, event: object) -> None:
        while not event:
            self._queue.pop(0)()

    def synchronise(self) -> None:
        self.counts["synchronise"] += 1
        assert self._captured is None, "waiting for a stream that is captured"
        while self._queue:
            self._queue.pop(0)()

    def capture(self, enqueue: Callable[[], None]) -> object:
        self.counts["capture"] += 1
        self._captured = []
        enqueue()
        graph, self._captured = self._captured, None
        return graph

    @property
    def is_capturing(self) -> bool:
        return self._captured is not None

    def replay(self, graph: Any) -> None:
        self.counts["replay"] += 1
        self._queue.extend(graph)

    def close(self) -> None:
        self.synchronise()
        self.closed = True


class HostEngine:
    """An engine that runs an ONNX graph with onnxruntime, on the memory that is bound.

    Attributes:
        contexts: all that were made.
        saved: how often the kernels were saved.
    """

    workspace_bytes = 1000

    def __init__(self, device: HostDevice, model: onnx.ModelProto, table: EngineTable) -> None:
        self.device, self.table = device, table
        self.session = onnxruntime.InferenceSession(
            model.SerializeToString(),
            session_options(Path(), 1),
            providers=["CPUExecutionProvider"],
            disabled_optimizers=["ConstantFolding"],
        )
        self.contexts: list[HostContext] = []
        self.saved = 0

    def new_context(self, workspace: int) -> HostContext:
        self.device.view(workspace, self.workspace_bytes)
        self.contexts.append(HostContext(self))
        return self.contexts[-1]

    def save_kernels(self) -> None:
        self.saved += 1


class HostContext:
    """Runs a :class:`HostEngine` with one set of shapes and addresses."""

    def __init__(self, engine: HostEngine) -> None:
        self._engine = engine
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._version = 0
        self._compiled: set[tuple[tuple[str, tuple[int, ...]], ...]] = set()

    def set_shape(self, name: str, shape: tuple[int, ...]) -> None:
        tensor = next(tensor for tensor in self._engine.table.tensors if tensor.name == name)
        assert tensor.profile is not None
        limits = zip(tensor.profile.min, shape, tensor.profile.max, strict=True)
        assert all(low <= axis <= high for low, axis, high in limits), (name, shape)
        self._shapes[name] = shape
        self._version += 1

    def set_address(self, name: str, address: int) -> None:
        assert address % ALIGNMENT == 0, name
        self._addresses[name] = address
        self._version += 1

    def is_capturable(self, stream: int) -> bool:
        return stream == STREAM

    def enqueue(self, stream: int) -> None:
        assert stream == STREAM
        device = self._engine.device
        device.counts["engine"] += 1
        shapes = tuple(sorted(self._shapes.items()))
        capturing = device.is_capturing
        assert not capturing or shapes in self._compiled, "a step is captured before it was run"
        self._compiled.add(shapes)
        arrays = {tensor.name: self._array(tensor) for tensor in self._engine.table.tensors}
        version = self._version

        def work() -> None:
            assert not capturing or version == self._version, "the context changed since its graph was captured"
            self._run(arrays)

        device.submit(work)

    def _array(self, tensor: EngineTensor) -> npt.NDArray[np.generic]:
        sizes = {
            axis: size
            for other in self._engine.table.tensors
            if other.name in self._shapes
            for axis, size in zip(other.shape, self._shapes[other.name], strict=True)
            if isinstance(axis, str)
        }
        shape = tuple(sizes[axis] if isinstance(axis, str) else axis for axis in tensor.shape)
        dtype = np.dtype(NUMPY[tensor.dtype])
        nbytes = int(np.prod(shape)) * dtype.itemsize
        return self._engine.device.view(self._addresses[tensor.name], nbytes).view(dtype).reshape(shape)

    def _run(self, arrays: dict[str, npt.NDArray[np.generic]]) -> None:
        binding = self._engine.session.io_binding()
        for tensor in self._engine.table.tensors:
            array = arrays[tensor.name]
            bind = binding.bind_input if tensor.mode == "input" else binding.bind_output
            bind(tensor.name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        self._engine.session.run_with_iobinding(binding)


def lift_weights(path: Path) -> tuple[onnx.ModelProto, dict[str, EngineTensor]]:
    """A traced graph, complete, whose experts and embedding have become inputs; and those inputs."""
    model = onnx.load(str(path), load_external_data=False)
    stored = {tensor.name for tensor in model.graph.initializer if tensor.data_location == onnx.TensorProto.EXTERNAL}
    onnx.load_external_data_for_model(model, str(path.parent))
    lifted: dict[str, EngineTensor] = {}
    kept = []
    for tensor in model.graph.initializer:
        if tensor.name not in stored or weight_class(tensor.name) not in ("experts", "embedding"):
            kept.append(tensor)
            continue
        model.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
        lifted[tensor.name] = EngineTensor(
            name=tensor.name, mode="input", dtype="float32", shape=tuple(tensor.dims), parts=(tensor.name,)
        )
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    return model, lifted
