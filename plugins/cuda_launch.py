"""Launches compiled kernels on a CUDA stream through the driver API. Needs cuda-python, and a GPU when it loads one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dgcompile.errors import EngineError, MissingDependencyError
from dgcompile.plugins.kernel_library import KernelLibrary
from dgcompile.plugins.launch import Launch
from dgcompile.plugins.operation import Plan

ALIGNMENT = 16
"""Of every pointer, in bytes: what the kernels were promised when they were compiled."""

_SCRATCH_POINTERS = 2
_STATIC_SHARED_LIMIT = 48 * 1024


def cuda_driver() -> Any:
    """``cuda.bindings.driver``.

    Raises:
        MissingDependencyError: cuda-python is not installed.
    """
    try:
        from cuda.bindings import driver
    except ImportError as problem:
        raise MissingDependencyError(
            f"kernels cannot be launched without cuda-python ({problem})", fix="pip install cuda-python"
        ) from problem
    return driver


class LoadedKernels:
    """Kernels of a library in the current CUDA context: each is loaded once, when it is first asked for.

    Args:
        library: what they are loaded from.
        driver: ``cuda.bindings.driver``.
    """

    def __init__(self, library: KernelLibrary, driver: Any) -> None:
        self.kernel_library = library
        self.driver = driver
        self._functions: dict[tuple[int, str], Any] = {}
        # The driver does not promise to copy the bytes of a cubin, nor to keep a library that nobody holds.
        self._loaded: list[tuple[bytes, Any]] = []

    def call(self, name: str, *arguments: Any) -> Any:
        """Calls a function of the driver and returns what it returned beside the status.

        Raises:
            EngineError: it failed; with CUDA's own name of the error.
        """
        status, *values = getattr(self.driver, name)(*arguments)
        if int(status) != 0:
            raise EngineError(f"{name} failed: {getattr(status, 'name', status)}")
        return values[0] if len(values) == 1 else values

    def function(self, launch: Launch) -> Any:
        """The function of a launch's kernel, ready to be launched in the current context.

        Raises:
            BundleError: the library lacks the kernel, or its file is damaged.
            EngineError: the driver refuses it, or there is no current context.
        """
        record = self.kernel_library.record(launch)
        key = (int(self.call("cuCtxGetCurrent")), record.key)
        found = self._functions.get(key)
        if found is not None:
            return found
        cubin = self.kernel_library.cubin(record)
        loaded = self.call("cuLibraryLoadData", cubin, [], [], 0, [], [], 0)
        self._loaded.append((cubin, loaded))
        kernel = self.call("cuLibraryGetKernel", loaded, record.entry.encode())
        # Loads the code into the context now: while a graph is being captured it would be too late.
        function = self.call("cuKernelGetFunction", kernel)
        if record.shared_bytes > _STATIC_SHARED_LIMIT:
            attribute = self.driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self.call("cuFuncSetAttribute", function, attribute, record.shared_bytes)
        self._functions[key] = function
        return function


class PreparedCall:
    """A plan with its kernels loaded and its arguments packed: :meth:`run` fills in addresses and launches, no more.

    Args:
        plan: what is launched.
        names: of the tensors whose addresses :meth:`run` takes, in order.
        kernels: where the kernels come from.

    Raises:
        BundleError, EngineError: as in :meth:`LoadedKernels.function`.
    """

    def __init__(self, plan: Plan, names: Sequence[str], kernels: LoadedKernels) -> None:
        self.workspace_bytes = plan.workspace_bytes
        self._launch = kernels.driver.cuLaunchKernel
        sources = {name: (index, 0) for index, name in enumerate(names)}
        sources |= {name: (len(names), offset) for name, (offset, _) in plan.buffers.items()}
        slots = sum(len(launch.arguments) + _SCRATCH_POINTERS for launch in plan.launches)
        # One slot of 8 bytes for each argument, and its address, which is what the driver takes.
        self._values = np.zeros(slots, np.uint64)
        self._places = self._values.ctypes.data + 8 * np.arange(slots, dtype=np.uint64)
        self._bases = np.zeros(len(names) + 1, np.uint64)
        pointers: list[tuple[int, int, int]] = []  # slot, index of the base, offset
        self._calls: list[tuple[Any, ...]] = []
        slot = 0
        for launch in plan.launches:
            function, record = kernels.function(launch), kernels.kernel_library.record(launch)
            parameters = self._places.ctypes.data + 8 * slot
            self._calls.append((function, *launch.grid, record.threads, 1, 1, record.shared_bytes, parameters))
            for argument, kind in zip(launch.arguments, launch.types, strict=True):
                if isinstance(argument, str):
                    pointers.append((slot, *sources[argument]))
                else:
                    self._values[slot] = packed(argument, kind)
                slot += 1
            slot += _SCRATCH_POINTERS  # kernels of these libraries need no scratch memory: null
        self._slots = np.array([slot for slot, _, _ in pointers])
        self._sources = np.array([index for _, index, _ in pointers])
        self._offsets = np.array([offset for _, _, offset in pointers], np.uint64)

    def run(self, addresses: Sequence[int], workspace: int, stream: int) -> None:
        """Launches on ``stream``; allocates nothing and waits for nothing, so a CUDA graph can capture it.

        Args:
            addresses: device addresses of the tensors.
            workspace: device address of at least ``workspace_bytes`` bytes.
            stream: a CUstream.

        Raises:
            EngineError: an address is not a multiple of ALIGNMENT, or the driver refuses a launch.
        """
        self._bases[:-1] = addresses
        self._bases[-1] = workspace
        pointers = self._bases[self._sources] + self._offsets
        if (pointers & np.uint64(ALIGNMENT - 1)).any():
            raise EngineError(
                f"tensors lie at {[hex(address) for address in addresses]}, workspace at {workspace:#x}",
                expected=f"multiples of {ALIGNMENT} bytes",
            )
        self._values[self._slots] = pointers
        for function, x, y, z, threads, one, also_one, shared, parameters in self._calls:
            (status,) = self._launch(function, x, y, z, threads, one, also_one, shared, stream, parameters, 0)
            if int(status) != 0:
                raise EngineError(f"cuLaunchKernel failed: {getattr(status, 'name', status)}")


def packed(value: int | float, kind: str) -> int:
    """The bits of a number as a kernel's argument of type "i32" or "fp32", in the low half of a slot.

    Raises:
        ValueError: another type, or a number that it does not hold.
    """
    if kind == "i32" and isinstance(value, int):
        if not -(2**31) <= value < 2**31:
            raise ValueError(f"{value} does not fit into 32 bits")
        return value & 0xFFFFFFFF
    if kind == "fp32":
        return int(np.float32(value).view(np.uint32))
    raise ValueError(f"{value!r} cannot be passed as {kind}")
