"""The NVIDIA GPU as a :class:`~dgcompile.runtime.device.Device`, through cuda-python's driver bindings."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np

from dgcompile.errors import EngineError, MissingDependencyError
from dgcompile.gpu import Card
from dgcompile.runtime.device import HostBuffer

_MAX_PITCH = 2**31 - 1  # CU_DEVICE_ATTRIBUTE_MAX_PITCH of every GPU so far


class CudaDevice:
    """One GPU with its primary context, which TensorRT uses too, and one stream.

    Args:
        card: which GPU.
        extra: the extra of this package that installs cuda-python, for the message when it is missing.
        driver: the module ``cuda.bindings.driver``, for tests; None to import it.

    Raises:
        MissingDependencyError: cuda-python is not installed.
        EngineError: the driver refuses.
    """

    def __init__(self, card: Card, extra: str, driver: Any = None) -> None:
        self._driver = _import_driver(extra) if driver is None else driver
        self._card = card
        self._allocations: dict[int, tuple[int, str]] = {}
        self._host_allocations: list[int] = []
        self._graphs: list[Any] = []
        self._closed = False
        self._call("cuInit", 0)
        self._device = self._call("cuDeviceGet", card.index)
        self._context = self._call("cuDevicePrimaryCtxRetain", self._device)
        self.make_current()
        # Not a blocking stream: it does not wait for the legacy default stream, which nothing here uses.
        self._stream = self._call("cuStreamCreate", self._driver.CUstream_flags.CU_STREAM_NON_BLOCKING)

    @property
    def name(self) -> str:
        """The product's name."""
        return self._card.name

    @property
    def stream(self) -> int:
        """Handle of the stream."""
        return int(self._stream)

    def make_current(self) -> None:
        """Makes the GPU's primary context that of the calling thread."""
        self._call("cuCtxSetCurrent", self._context)

    def memory(self) -> tuple[int, int]:
        """Bytes of device memory: free, in total."""
        free, total = self._call("cuMemGetInfo")
        return int(free), int(total)

    def allocate(self, nbytes: int, purpose: str) -> int:
        """Device memory, at a multiple of 256 bytes."""
        code, pointer = self._driver.cuMemAlloc(max(nbytes, 1))
        if code == self._driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            free, total = self.memory()
            held = ", ".join(f"{name} {_gb(size)}" for name, size in self._held().items())
            raise EngineError(
                f"{self.name} has no room for the {purpose}: {_gb(nbytes)} needed, {_gb(free)} of {_gb(total)} free"
                + (f" (allocated: {held})" if held else ""),
                fix="close what else uses the GPU, or build the bundle with a smaller --max-context or --max-batch",
            )
        self._check("cuMemAlloc", code)
        address = int(pointer)
        self._allocations[address] = (nbytes, purpose)
        return address

    def _held(self) -> dict[str, int]:
        """Bytes allocated so far by purpose."""
        sums: dict[str, int] = {}
        for nbytes, purpose in self._allocations.values():
            sums[purpose] = sums.get(purpose, 0) + nbytes
        return sums

    def allocate_host(self, nbytes: int) -> HostBuffer:
        """Pinned host memory, zeroed."""
        nbytes = max(nbytes, 1)
        address = int(self._call("cuMemHostAlloc", nbytes, self._driver.CU_MEMHOSTALLOC_PORTABLE))
        self._host_allocations.append(address)
        buffer: HostBuffer = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
        buffer[:] = 0
        return buffer

    def upload(self, target: int, source: HostBuffer) -> None:
        """Enqueues a copy to device memory."""
        self._call("cuMemcpyHtoDAsync", target, source.ctypes.data, source.nbytes, self._stream)

    def download(self, target: HostBuffer, source: int) -> None:
        """Enqueues a copy from device memory."""
        self._call("cuMemcpyDtoHAsync", target.ctypes.data, source, target.nbytes, self._stream)

    def copy(self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, height: int = 1) -> None:
        """Enqueues a copy within device memory; see :meth:`Device.copy`."""
        if height == 1 or max(source_pitch, target_pitch) > _MAX_PITCH:
            for row in range(height):
                where = (target + row * target_pitch, source + row * source_pitch)
                self._call("cuMemcpyDtoDAsync", *where, width, self._stream)
            return
        pieces = self._driver.CUDA_MEMCPY2D()
        pieces.srcMemoryType = pieces.dstMemoryType = self._driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
        pieces.srcDevice, pieces.srcPitch = source, source_pitch
        pieces.dstDevice, pieces.dstPitch = target, target_pitch
        pieces.WidthInBytes, pieces.Height = width, height
        self._call("cuMemcpy2DAsync", pieces, self._stream)

    def read(self, address: int, nbytes: int) -> HostBuffer:
        """A copy of device memory as it is when everything enqueued is done."""
        self.synchronise()
        buffer = np.empty(nbytes, dtype=np.uint8)
        self._call("cuMemcpyDtoH", buffer.ctypes.data, address, nbytes)
        return buffer

    def zero(self, address: int, nbytes: int) -> None:
        """Enqueues zeroing."""
        self._call("cuMemsetD8Async", address, 0, nbytes, self._stream)

    def record(self) -> object:
        """An event that marks what is enqueued so far."""
        event = self._call("cuEventCreate", self._driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        self._call("cuEventRecord", event, self._stream)
        return event

    def wait(self, event: object) -> None:
        """Blocks until everything that an event marks is done; the event is used up."""
        self._call("cuEventSynchronize", event)
        self._call("cuEventDestroy", event)

    def synchronise(self) -> None:
        """Blocks until everything enqueued is done."""
        self._call("cuStreamSynchronize", self._stream)

    def capture(self, enqueue: Callable[[], None]) -> object:
        """A graph of what ``enqueue`` enqueues."""
        # Only this thread's calls are watched: TensorRT's compiler threads may allocate meanwhile.
        mode = self._driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._call("cuStreamBeginCapture", self._stream, mode)
        try:
            enqueue()
        except BaseException:
            # The capture must end whatever happened, or the stream stays unusable; its own error would hide the cause.
            self._driver.cuStreamEndCapture(self._stream)
            raise
        captured = self._call("cuStreamEndCapture", self._stream)
        graph = self._call("cuGraphInstantiate", captured, 0)
        self._call("cuGraphDestroy", captured)
        self._graphs.append(graph)
        return graph

    def replay(self, graph: object) -> None:
        """Enqueues a graph."""
        self._call("cuGraphLaunch", graph, self._stream)

    def close(self) -> None:
        """Waits, then frees everything that was allocated; the arrays over host memory must not be used any more."""
        if self._closed:
            return
        self._closed = True
        self.make_current()
        self.synchronise()
        for graph in self._graphs:
            self._call("cuGraphExecDestroy", graph)
        for address in self._allocations:
            self._call("cuMemFree", address)
        for address in self._host_allocations:
            self._call("cuMemFreeHost", address)
        self._call("cuStreamDestroy", self._stream)
        self._call("cuDevicePrimaryCtxRelease", self._device)

    def _call(self, function: str, *arguments: Any) -> Any:
        """Calls the driver; its one result, or a tuple of several."""
        code, *results = getattr(self._driver, function)(*arguments)
        self._check(function, code)
        return results[0] if len(results) == 1 else tuple(results)

    def _check(self, function: str, code: Any) -> None:
        if code != self._driver.CUresult.CUDA_SUCCESS:
            _, text = self._driver.cuGetErrorString(code)
            meaning = text.decode(errors="replace") if text else "unknown error"
            raise EngineError(f"{self.name}: {function} failed with {getattr(code, 'name', code)} ({meaning})")


def _import_driver(extra: str) -> Any:
    try:
        return import_module("cuda.bindings.driver")
    except ImportError as error:
        raise MissingDependencyError(
            f"cuda-python cannot be imported here ({error})", fix=f"pip install 'dgcompile[{extra}]'"
        ) from error


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB"
