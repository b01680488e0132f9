"""CudaDevice against a driver of host memory: what is called with what, and what becomes of errors."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dgcompile.errors import EngineError, MissingDependencyError
from dgcompile.gpu import Card
from dgcompile.runtime import cuda_device
from dgcompile.runtime.cuda_device import CudaDevice

CARD = Card(3, "Fake GPU", "12.0", 1 << 20, 10)


class Result(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_ILLEGAL_ADDRESS = 700


class FakeDriver:
    """The functions of ``cuda.bindings.driver`` that are used; device memory is host memory, copies happen at once."""

    CUresult = Result
    CU_MEMHOSTALLOC_PORTABLE = 1
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUevent_flags = SimpleNamespace(CU_EVENT_DISABLE_TIMING=2)
    CUmemorytype = SimpleNamespace(CU_MEMORYTYPE_DEVICE=2)
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL=1)
    CUDA_MEMCPY2D = SimpleNamespace

    def __init__(self, room: int = 1 << 20) -> None:
        self.room = room
        self.blocks: dict[int, Any] = {}
        self.calls: list[str] = []
        self.failing: dict[str, Result] = {}

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if not name.startswith("cu"):
            return found

        def call(*arguments: Any) -> Any:
            self.calls.append(name)
            if name in self.failing:
                return (self.failing[name], None)
            result = found(*arguments)
            return result if result and isinstance(result[0], Result) else (Result.CUDA_SUCCESS, *result)

        return call

    def _block(self, nbytes: int) -> tuple[int]:
        block = ctypes.create_string_buffer(b"\xff" * nbytes, nbytes)
        self.blocks[ctypes.addressof(block)] = block
        return (ctypes.addressof(block),)

    def _free(self, address: int) -> tuple[()]:
        del self.blocks[address]
        return ()

    def _none(self, *arguments: Any) -> tuple[()]:
        return ()

    def _copy(self, target: int, source: int, nbytes: int, stream: int = 9) -> tuple[()]:
        assert stream == 9
        ctypes.memmove(target, source, nbytes)
        return ()

    cuInit = cuCtxSetCurrent = cuEventRecord = cuEventSynchronize = cuEventDestroy = _none
    cuStreamSynchronize = cuStreamBeginCapture = cuGraphDestroy = cuGraphLaunch = _none
    cuGraphExecDestroy = cuStreamDestroy = cuDevicePrimaryCtxRelease = _none
    cuMemHostAlloc = lambda self, nbytes, flags: self._block(nbytes)  # noqa: E731
    cuMemFree = cuMemFreeHost = _free
    cuMemcpyHtoDAsync = cuMemcpyDtoHAsync = cuMemcpyDtoDAsync = cuMemcpyDtoH = _copy

    def cuDeviceGet(self, index: int) -> tuple[int]:
        assert index == CARD.index
        return (30,)

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[int]:
        assert device == 30
        return (31,)

    def cuStreamCreate(self, flags: int) -> tuple[int]:
        return (9,)

    def cuEventCreate(self, flags: int) -> tuple[str]:
        return ("event",)

    def cuStreamEndCapture(self, stream: int) -> tuple[str]:
        return ("captured",)

    def cuGraphInstantiate(self, graph: str, flags: int) -> tuple[str]:
        assert graph == "captured"
        return ("graph",)

    def cuMemGetInfo(self) -> tuple[int, int]:
        return (self.room, 1 << 20)

    def cuMemAlloc(self, nbytes: int) -> Any:
        if nbytes > self.room:
            return (Result.CUDA_ERROR_OUT_OF_MEMORY, 0)
        self.room -= nbytes
        return self._block(nbytes)

    def cuMemsetD8Async(self, address: int, value: int, nbytes: int, stream: int) -> tuple[()]:
        ctypes.memset(address, value, nbytes)
        return ()

    def cuMemcpy2DAsync(self, pieces: Any, stream: int) -> tuple[()]:
        assert pieces.srcMemoryType == pieces.dstMemoryType == 2
        for row in range(pieces.Height):
            target, source = pieces.dstDevice + row * pieces.dstPitch, pieces.srcDevice + row * pieces.srcPitch
            ctypes.memmove(target, source, pieces.WidthInBytes)
        return ()

    def cuGetErrorString(self, code: Result) -> tuple[bytes]:
        return (b"an illegal memory access was encountered",)


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


@pytest.fixture
def device(driver: FakeDriver) -> CudaDevice:
    return CudaDevice(CARD, "rtx5090", driver)


def test_memory_and_copies(device: CudaDevice) -> None:
    host = device.allocate_host(12)
    assert not host.any()
    host[:] = range(12)
    first, second = device.allocate(12, "first"), device.allocate(24, "second")
    device.upload(first, host)
    device.zero(second, 24)
    device.copy(second, 8, first, 4, 3, 3)  # rows of 4 bytes to rows of 8, three bytes of each
    assert device.read(second, 24).tolist() == [0, 1, 2, *[0] * 5, 4, 5, 6, *[0] * 5, 8, 9, 10, *[0] * 5]
    device.download(host, second)
    assert host[8:11].tolist() == [4, 5, 6]
    assert device.memory() == ((1 << 20) - 36, 1 << 20)


def test_pitches_that_the_driver_does_not_take_are_copied_row_by_row(
    device: CudaDevice, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_device, "_MAX_PITCH", 7)
    host = device.allocate_host(12)
    host[:] = range(12)
    first, second = device.allocate(12, "first"), device.allocate(24, "second")
    device.upload(first, host)
    device.zero(second, 24)
    device.copy(second, 8, first, 4, 3, 3)
    assert "cuMemcpy2DAsync" not in driver.calls
    assert device.read(second, 24)[16:19].tolist() == [8, 9, 10]


def test_too_little_memory_names_the_sizes(device: CudaDevice) -> None:
    device.allocate(600_000, "weights")
    with pytest.raises(
        EngineError, match=r"Fake GPU has no room for the cache: 0.00 GB needed.*allocated: weights 0.00"
    ):
        device.allocate(600_000, "cache")


def test_a_graph_is_captured_and_replayed(device: CudaDevice, driver: FakeDriver) -> None:
    graph = device.capture(lambda: driver.calls.append("enqueued"))
    device.replay(graph)
    begin = driver.calls.index("cuStreamBeginCapture")
    assert driver.calls[begin:] == [
        "cuStreamBeginCapture",
        "enqueued",
        "cuStreamEndCapture",
        "cuGraphInstantiate",
        "cuGraphDestroy",
        "cuGraphLaunch",
    ]


def test_a_capture_ends_when_its_work_fails(device: CudaDevice, driver: FakeDriver) -> None:
    def fail() -> None:
        raise EngineError("the engine failed")

    with pytest.raises(EngineError, match="the engine failed"):
        device.capture(fail)
    assert driver.calls[-1] == "cuStreamEndCapture"


def test_errors_say_which_call_failed(device: CudaDevice, driver: FakeDriver) -> None:
    driver.failing["cuStreamSynchronize"] = Result.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(EngineError, match=r"Fake GPU: cuStreamSynchronize failed with CUDA_ERROR_ILLEGAL_ADDRESS \(an"):
        device.synchronise()


def test_events_and_closing(device: CudaDevice, driver: FakeDriver) -> None:
    device.wait(device.record())
    device.allocate(5, "first")
    device.allocate_host(5)
    device.capture(lambda: None)
    device.close()
    device.close()
    assert driver.blocks == {}
    assert driver.calls.count("cuDevicePrimaryCtxRelease") == driver.calls.count("cuGraphExecDestroy") == 1


def test_cuda_python_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(cuda_device, "import_module", missing)
    with pytest.raises(MissingDependencyError, match=r"pip install 'dgcompile\[h100\]'"):
        CudaDevice(CARD, "h100")


def test_the_bindings_have_what_is_called() -> None:
    """The stand-in above must not know names that cuda-python does not."""
    driver: Any = pytest.importorskip("cuda.bindings.driver")
    assert [name for name in vars(FakeDriver) if name.startswith("cu") and not hasattr(driver, name)] == []
    for enum in ("CUstream_flags", "CUevent_flags", "CUmemorytype", "CUstreamCaptureMode"):
        assert all(hasattr(getattr(driver, enum), name) for name in vars(getattr(FakeDriver, enum)))
    pieces = driver.CUDA_MEMCPY2D()
    for name in ("srcMemoryType", "srcDevice", "srcPitch", "dstDevice", "dstPitch", "WidthInBytes", "Height"):
        assert hasattr(type(pieces), name)
    assert {code.name: int(getattr(driver.CUresult, code.name)) for code in Result} == {
        code.name: int(code) for code in Result
    }
    assert np.uint64(int(driver.CUdeviceptr(7))) == 7


SCRIPT = """
import ctypes

from dgcompile.errors import EngineError
from dgcompile.gpu import Card
from dgcompile.runtime.cuda_device import CudaDevice

device = CudaDevice(Card(3, "Fake GPU", "12.0", 1, 1), "rtx5090")
assert (device.memory(), device.stream) == ((123, 456), 0x99)
host = device.allocate_host(12)
assert not host.any()
host[:] = range(12)
first, second = device.allocate(12, "first"), device.allocate(24, "second")
device.upload(first, host)
device.zero(second, 24)
device.copy(second, 8, first, 4, 3, 3)
assert device.read(second, 24).tolist() == [0, 1, 2, *[0] * 5, 4, 5, 6, *[0] * 5, 8, 9, 10, *[0] * 5]
device.copy(second, 8, first + 9, 4, 3)
device.download(host, second)
assert host[:3].tolist() == [9, 10, 11]
device.wait(device.record())
device.replay(device.capture(lambda: device.zero(first, 12)))
try:
    device.allocate(1 << 31, "cache")
except EngineError as error:
    assert "no room for the cache: 2.15 GB needed" in str(error), error
ctypes.CDLL(None).setenv(b"FAIL", b"1", 1)
try:
    device.synchronise()
except EngineError as error:
    assert "cuStreamSynchronize failed with CUDA_ERROR_ILLEGAL_ADDRESS (an illegal memory" in str(error), error
else:
    raise AssertionError("no error")
ctypes.CDLL(None).unsetenv(b"FAIL")
device.close()
"""


def test_the_real_bindings_pass_everything_on(tmp_path: Path) -> None:
    """cuda-python between CudaDevice and a driver that is compiled here."""
    pytest.importorskip("cuda.bindings.driver")
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    source = Path(__file__).with_name("fake_driver.c")
    library = tmp_path / "libcuda.so.1"
    command = ["cc", "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, check=True)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == [
        "current 0x31",
        "stream 1",
        "host 12 1",
        "upload 12 0x99",
        "set 24 0x99",
        "copy types 2 2 at 0 0 0 0 0x99",
        "synchronise 0x99",
        "copy 3 0x99",
        "download 12 0x99",
        "event 2",
        "record 0x55 0x99",
        "wait 0x55",
        "begin 0x99 1",
        "set 12 0x99",
        "end 0x99",
        "instantiate 0x77 0",
        "destroy graph 0x77",
        "replay 0x78 0x99",
        "synchronise 0x99",
        "current 0x31",
        "synchronise 0x99",
        "destroy executable 0x78",
        "free",
        "free",
        "free host",
        "destroy stream 0x99",
        "release 3",
    ]
