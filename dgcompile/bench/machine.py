"""Facts of this machine and of this process, from where Linux keeps them. Elsewhere some are unknown."""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from dgcompile.plan.host import machine_memory

PACKAGES = ("dgcompile", "numpy", "onnxruntime", "tensorrt", "tensorrt_rtx", "torch", "transformers")
"""Whose versions a report has, where they are installed."""

_SAMPLE_SECONDS = 0.01
_PEAK = "VmHWM"


class Machine(BaseModel):
    """What a report says of the machine.

    Attributes:
        cpu: its model, as the system has it.
        cores: physical cores that this process may use.
        memory: bytes.
        load: processes that wanted to run, as a mean over the minute before; None where the system does not say.
        python: version.
        packages: versions of those that are installed, of :data:`PACKAGES`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    cpu: str
    cores: int
    memory: int
    load: float | None
    python: str
    packages: dict[str, str]

    @classmethod
    def this(cls) -> Machine:
        """The machine that this runs on."""
        return cls(
            cpu=_cpu_model(),
            cores=physical_cores(),
            memory=machine_memory(),
            load=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
            python=platform.python_version(),
            packages=versions(),
        )


def versions() -> dict[str, str]:
    """Versions of the installed ones of :data:`PACKAGES`. Nothing is imported for it."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def physical_cores() -> int:
    """Physical cores among the processors that this process may use. Two threads of one core share its arithmetic."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = {_core(processor) for processor in usable}
    return len(usable) if None in cores else len(cores)


def swapped_pages() -> int | None:
    """Pages that went to the swap and back since the machine started; None where the system does not say."""
    text = _read("/proc/vmstat")
    counts = [int(line.split()[1]) for line in text.splitlines() if line.startswith(("pswpin ", "pswpout "))]
    return sum(counts) if counts else None


class Strangers:
    """How much of the processors others used while a worker was measured."""

    def __init__(self) -> None:
        self.used = 0.0
        self.elapsed = 0.0

    @contextmanager
    def beside(self, pid: int) -> Iterator[None]:
        """Around the work of process ``pid``."""
        started, before = time.perf_counter(), _processor_seconds()
        own = _process_seconds(pid) + time.process_time()
        yield
        own = _process_seconds(pid) + time.process_time() - own
        self.used += max(0.0, _processor_seconds() - before - own)
        self.elapsed += time.perf_counter() - started

    @property
    def processors(self) -> float | None:
        """How many processors they kept busy; None where nothing was seen."""
        return self.used / self.elapsed if self.elapsed and _processor_seconds() else None


def _processor_seconds() -> float:
    """Seconds that all processors of the machine were busy since it started; 0 where the system does not say."""
    fields = _read("/proc/stat").partition("\n")[0].split()[1:]
    # user, nice, system, idle, iowait, irq, softirq, steal; proc(5)
    busy = [int(value) for index, value in enumerate(fields[:8]) if index not in (3, 4)]
    return sum(busy) / _ticks()


def _process_seconds(pid: int) -> float:
    """Processor time of a process so far; 0 where the system does not say."""
    # After the name, which may hold anything but ends with the last parenthesis, utime and stime are 11 fields on.
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _ticks() if fields else 0.0


def _ticks() -> int:
    return os.sysconf("SC_CLK_TCK")


def _core(processor: int) -> tuple[str, str] | None:
    folder = f"/sys/devices/system/cpu/cpu{processor}/topology"
    package, core = _read(f"{folder}/physical_package_id"), _read(f"{folder}/core_id")
    return (package, core) if package and core else None


def _cpu_model() -> str:
    names = [line.partition(":")[2].strip() for line in _read("/proc/cpuinfo").splitlines() if "model name" in line]
    return names[0] if names else platform.processor() or platform.machine()


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


class Memory(BaseModel):
    """Memory of one process while one ``generate()`` ran, in bytes; None where the system does not say.

    Attributes:
        peak_rss: most that was resident, mapped files included.
        peak_anonymous: most that belongs to no file, looked at every 10 ms: only this cannot be dropped.
        since_start: most that was ever resident in the process, loading included.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    peak_rss: int | None
    peak_anonymous: int | None
    since_start: int | None


def watch_memory(work: Callable[[], Any]) -> Memory:
    """Does ``work`` and says what memory this process had meanwhile."""
    since_start = _status(_PEAK)
    # Linux then counts the peak from here; proc(5), clear_refs.
    forgotten = _write("/proc/self/clear_refs", "5")
    with _sampled("RssAnon") as most:
        work()
    peak = _status(_PEAK)
    return Memory(
        peak_rss=peak if forgotten else None,
        peak_anonymous=most() or None,
        since_start=max(since_start or 0, peak or 0) or None,
    )


@contextmanager
def _sampled(key: str) -> Iterator[Callable[[], int]]:
    most = 0
    done = threading.Event()

    def look() -> None:
        nonlocal most
        while True:
            most = max(most, _status(key) or 0)
            if done.wait(_SAMPLE_SECONDS):
                return

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield lambda: most
    finally:
        done.set()
        thread.join()


def _status(key: str) -> int | None:
    """A line of /proc/self/status, in bytes."""
    for line in _read("/proc/self/status").splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return None


def _write(path: str, text: str) -> bool:
    try:
        Path(path).write_text(text)
    except OSError:
        return False
    return True
