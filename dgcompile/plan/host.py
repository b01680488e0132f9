"""What a build needs of the machine that runs it: memory, stage by stage, and disk."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from dgcompile.contract import GRAPH_FILES
from dgcompile.engine_table import engine_file, graph_engine_file
from dgcompile.files import PARTIAL_SUFFIX
from dgcompile.plan.device import DeviceMemory
from dgcompile.plan.weights import parameters_of
from dgcompile.plan.workload import Workload
from dgcompile.safetensors_file import StoredTensor
from dgcompile.weights_store import WEIGHTS_FILE, Store

# Estimates, from builds that were watched without a GPU: what a stage's process takes whatever the model's size.
_TRACE_BYTES = 1_000_000_000
_TORCH_BYTES = 600_000_000
_LIBRARY_BYTES = 700_000_000
_COMPILER_BYTES = 250_000_000

_MOST_COMPILERS = 32
"""Processes that compile kernels at once, at most: a model has no more kernels."""

_PIECE_ELEMENTS = 4 << 20
"""Elements that the conversion reads at once, or a slice of a weight's leading axis where that is longer."""

_BYTES_PER_ELEMENT = 16
"""Of a piece while it is converted: as read, in float32, its error, its codes."""

_FULL_PRECISION = 4
"""Bytes of a parameter while a calibration runs, which loads the model in float32."""

# Bytes on disk, from bundles that were built: graphs and engines grow with the layers, kernels do not.
_GRAPH_BYTES_PER_LAYER = 35_000
_CPU_ENGINE_BYTES_PER_LAYER = 60_000
_ENGINE_BYTES = 2_000_000
_ENGINE_BYTES_PER_LAYER = 1_500_000
_LIST_BYTES_PER_LAYER = 45_000
_KERNEL_BYTES = 1_000_000

ASSETS, KERNELS = "assets", "kernels"
"""Names that plans have for several files of a bundle."""

_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


@dataclass(frozen=True)
class HostMemory:
    """Memory of the building machine, in bytes.

    Attributes:
        stages: the most that each stage takes at once; estimates.
        machine: what the machine, or the container, has.
        available: what is free now, or can be freed; None where the system does not say.
    """

    stages: Mapping[str, int]
    machine: int
    available: int | None

    @property
    def needed(self) -> int:
        """Of the stage that takes most."""
        return max(self.stages.values())


@dataclass(frozen=True)
class Disk:
    """Disk space of a bundle, in bytes.

    Attributes:
        files: of its files; estimates but for the weights.
        present: what of these an earlier build left in the folder.
        free: on the folder's file system; None where that is not known.
        folder: of the bundle; None for a plan that is in none.
    """

    files: Mapping[str, int]
    present: int
    free: int | None
    folder: Path | None = None

    @property
    def bundle(self) -> int:
        """Of the finished bundle."""
        return sum(self.files.values())

    @property
    def needed(self) -> int:
        """That the build still has to write."""
        return max(0, self.bundle - self.present)


def host_memory(workload: Workload, store: Store, device: DeviceMemory, *, calibrates: bool) -> HostMemory:
    """What each stage of a build needs of this machine's memory.

    Args:
        workload: what is planned.
        store: its weights.
        device: what it takes where it runs.
        calibrates: whether ranges of activations are taken, which runs the whole model.
    """
    piece = max(
        _PIECE_ELEMENTS, *(math.prod(shape[1:]) for shape in workload.spec.expected_tensors().values() if shape[1:])
    )
    scales = max(sum(t.nbytes for t in _scales(weight.parts, store)) for weight in store.weights.values())
    stages = {"trace": _TRACE_BYTES, "weights": _TORCH_BYTES + _BYTES_PER_ELEMENT * piece + scales}
    if calibrates:
        parameters = sum(parameters_of(workload.spec).values())
        stages["calibration"] = _TRACE_BYTES + _FULL_PRECISION * parameters
    if workload.on_gpu:
        stages["kernels"] = _COMPILER_BYTES * min(_MOST_COMPILERS, len(os.sched_getaffinity(0)))
        # The builder holds an engine's constants once as it maps them and once as it writes them.
        stages["engine"] = _LIBRARY_BYTES + 2 * max(device.engine_weights.values())
    else:
        stages["engine"] = _LIBRARY_BYTES + device.converted_weights
    return HostMemory(stages, machine_memory(), available_memory())


def _scales(parts: Mapping[str, str], store: Store) -> list[StoredTensor]:
    return [store.tensors[name] for suffix, name in parts.items() if suffix]


def disk(workload: Workload, store: Store, device: DeviceMemory, *, assets: int, free: int | None = None) -> Disk:
    """The files of a bundle; :func:`present_bytes` says what is there.

    Args:
        workload: what is planned.
        store: its weights.
        device: what it takes where it runs.
        assets: bytes of the tokenizer and other small files.
        free: bytes that are free where the bundle will lie.
    """
    layers = workload.spec.num_hidden_layers
    files = {WEIGHTS_FILE: store.nbytes, ASSETS: assets}
    files |= dict.fromkeys(GRAPH_FILES.values(), _GRAPH_BYTES_PER_LAYER * layers)
    if workload.on_gpu:
        files[KERNELS] = _KERNEL_BYTES
        for graph, constants in device.engine_weights.items():
            code = _ENGINE_BYTES + (_ENGINE_BYTES_PER_LAYER + _LIST_BYTES_PER_LAYER) * layers
            files[engine_file(graph)] = constants + code
    else:
        files |= {graph_engine_file(graph): _CPU_ENGINE_BYTES_PER_LAYER * layers for graph in GRAPH_FILES}
    return Disk(files, 0, free)


def present_bytes(folder: Path, planned: Mapping[str, int], finished: Collection[str]) -> int:
    """What of a bundle's planned files needs no more disk space: they are finished, or their space is taken already.

    Args:
        folder: of the bundle.
        planned: bytes of each file.
        finished: names of files that are kept as they are.
    """
    present = 0
    for name, size in planned.items():
        partial = folder / (name + PARTIAL_SUFFIX)
        if name in finished:
            present += size
        elif partial.is_file():
            present += min(size, partial.stat().st_blocks * 512)  # it may have holes
    return present


def free_bytes(folder: Path) -> int | None:
    """Free space on the file system where a folder lies or will lie; None where that cannot be found out."""
    place = folder.absolute()
    try:
        while not place.exists():
            place = place.parent
        usage = shutil.disk_usage(place)
    except OSError:
        return None
    return usage.free if usage.total else None  # /proc and the like have no size


def machine_memory() -> int:
    """Memory of this machine in bytes, or of the container where that has less."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for file in _CGROUP_LIMITS:
        try:
            memory = min(memory, int(file.read_text()))
        except (OSError, ValueError):  # another system, or "max"
            continue
    return memory


def available_memory() -> int | None:
    """Memory in bytes that is free or can be freed; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
