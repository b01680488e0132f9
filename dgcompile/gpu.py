"""Which NVIDIA driver and GPUs this machine has, asked of the driver itself. Imports nothing but errors.

A bundle for a GPU is refused here, in one line, before a library of several gigabytes is loaded to find out the same.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType

from dgcompile.errors import BundleError, MissingDependencyError

DRIVER_LIBRARY = "libcuda.so.1"
"""The driver's own library: it comes with the driver and with nothing else."""

LIBRARY_EXTRAS = {"tensorrt_rtx": "rtx5090", "tensorrt": "h100"}
"""Extra of this package that installs an engine library."""

LIBRARY_CUDA = {"tensorrt_rtx": (13, 0), "tensorrt": (13, 0)}
"""CUDA version that the driver must offer, per engine library: their wheels are built with CUDA 13."""

CUDA_DRIVERS = {(13, 0): "580"}
"""Oldest branch of the Linux driver that offers a CUDA version ("CUDA Toolkit Release Notes", table 2)."""

_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_ATTRIBUTES = {"multiprocessors": 16, "major": 75, "minor": 76}  # of CUdevice_attribute
_VERSION_FILE = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Card:
    """One GPU.

    Attributes:
        index: the driver's number of it, as CUDA_VISIBLE_DEVICES left it.
        name: the product's name.
        compute_capability: such as "12.0".
        memory_bytes: all of its memory.
        multiprocessors: streaming multiprocessors.
    """

    index: int
    name: str
    compute_capability: str
    memory_bytes: int
    multiprocessors: int


@dataclass(frozen=True)
class Gpus:
    """The driver and its GPUs.

    Attributes:
        driver_cuda: newest CUDA version that the driver offers, (major, minor); None without a driver.
        driver_version: the driver's own version, such as "580.82.07"; None where Linux does not tell it.
        cards: what the driver can see.
        problem: why there is no driver or no card; None when there is a card.
    """

    driver_cuda: tuple[int, int] | None
    driver_version: str | None
    cards: tuple[Card, ...]
    problem: str | None


class _DriverFailed(Exception):
    """A call of the driver failed: its result code and its name."""

    def __init__(self, function: str, code: int, name: str) -> None:
        super().__init__(f"{function} failed with {name}")
        self.code = code


class _Driver:
    """The few functions of the driver's library that are needed, through ctypes."""

    def __init__(self, library: str) -> None:
        self._library = ctypes.CDLL(library)

    def call(self, function: str, *arguments: object) -> None:
        code = int(getattr(self._library, function)(*arguments))
        if code:
            raise _DriverFailed(function, code, self._error_name(code))

    def integer(self, function: str, *arguments: object) -> int:
        """What ``function`` writes through its first argument, an int."""
        value = ctypes.c_int()
        self.call(function, ctypes.byref(value), *arguments)
        return value.value

    def _error_name(self, code: int) -> str:
        name = ctypes.c_char_p()
        self._library.cuGetErrorName(code, ctypes.byref(name))
        return name.value.decode(errors="replace") if name.value else f"error {code}"


def query_gpus(library: str = DRIVER_LIBRARY) -> Gpus:
    """Asks the driver; never raises, since having no GPU is an answer.

    Args:
        library: the driver's library, for tests.
    """
    version = _driver_version()
    try:
        driver = _Driver(library)
    except OSError:
        return Gpus(None, version, (), f"this machine has no NVIDIA driver ({library} cannot be loaded)")
    cuda: tuple[int, int] | None = None
    try:
        # Works before cuInit, which fails where there is a driver but no GPU.
        number = driver.integer("cuDriverGetVersion")
        cuda = (number // 1000, number % 1000 // 10)
        driver.call("cuInit", 0)
        cards = tuple(_card(driver, index) for index in range(driver.integer("cuDeviceGetCount")))
    except _DriverFailed as error:
        problem = (
            "this machine has an NVIDIA driver but no GPU" if error.code == _NO_DEVICE else f"NVIDIA driver: {error}"
        )
        return Gpus(cuda, version, (), problem)
    except AttributeError as error:
        return Gpus(cuda, version, (), f"{library} is no NVIDIA driver ({error})")
    return Gpus(cuda, version, cards, None if cards else "this machine has an NVIDIA driver but no GPU")


def _card(driver: _Driver, index: int) -> Card:
    device = driver.integer("cuDeviceGet", index)
    name = ctypes.create_string_buffer(256)
    driver.call("cuDeviceGetName", name, len(name), device)
    memory = ctypes.c_size_t()
    driver.call("cuDeviceTotalMem_v2", ctypes.byref(memory), device)
    facts = {fact: driver.integer("cuDeviceGetAttribute", number, device) for fact, number in _ATTRIBUTES.items()}
    return Card(
        index=index,
        name=name.value.decode(errors="replace"),
        compute_capability=f"{facts['major']}.{facts['minor']}",
        memory_bytes=memory.value,
        multiprocessors=facts["multiprocessors"],
    )


def _driver_version(file: Path = _VERSION_FILE) -> str | None:
    try:
        found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", file.read_text(errors="replace"))
    except OSError:
        return None
    return found.group() if found else None


def check_gpu(compute_capability: str, library: str, gpus: Gpus | None = None) -> Card:
    """Refuses a machine that cannot run an engine.

    Args:
        compute_capability: of the GPU that the engine was built for, such as "12.0".
        library: what runs the engine: "tensorrt" or "tensorrt_rtx".
        gpus: what :func:`query_gpus` said; None to ask now.

    Returns:
        The first card that fits.

    Raises:
        BundleError: no driver, no GPU, a GPU of another compute capability, or a driver that is too old.
    """
    gpus = query_gpus() if gpus is None else gpus
    wanted = f"a GPU of compute capability {compute_capability}"
    if gpus.driver_cuda is None or not gpus.cards:
        fix = (
            "install the NVIDIA driver, or run this on a machine with such a GPU" if gpus.driver_cuda is None else None
        )
        raise BundleError(gpus.problem or "this machine has no GPU", expected=wanted, fix=fix)
    fitting = [card for card in gpus.cards if card.compute_capability == compute_capability]
    if not fitting:
        found = ", ".join(f"{card.name} ({card.compute_capability})" for card in gpus.cards)
        raise BundleError(
            f"this machine has {found}",
            expected=wanted,
            fix="build the checkpoint for this machine's GPU with --target",
        )
    needed = LIBRARY_CUDA[library]
    if gpus.driver_cuda < needed:
        installed = f" {gpus.driver_version}" if gpus.driver_version else ""
        raise BundleError(
            f"the NVIDIA driver{installed} offers CUDA {_dotted(gpus.driver_cuda)}",
            expected=f"CUDA {_dotted(needed)} or newer for {library}",
            fix=f"update the driver to {CUDA_DRIVERS[needed]} or newer",
        )
    return fitting[0]


def import_library(name: str, version: str | None = None) -> ModuleType:
    """Imports an engine library.

    Args:
        name: "tensorrt" or "tensorrt_rtx".
        version: the only one that will do, since an engine runs on exactly the version that built it; None for any.

    Raises:
        MissingDependencyError: it cannot be imported.
        BundleError: it has another version.
    """
    try:
        module = import_module(name)
    except ImportError as error:
        raise MissingDependencyError(
            f"{name} cannot be imported here ({error})", fix=f"pip install 'dgcompile[{LIBRARY_EXTRAS[name]}]'"
        ) from error
    if version is not None and module.__version__ != version:
        raise BundleError(
            f"this machine has {name} {module.__version__}",
            expected=f"{version}, which built the engines: they run on no other version",
            fix=f"pip install '{name}=={version}', or build the bundle again here",
        )
    return module


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
