"""What a command takes: seconds, memory and bytes of its whole process tree, for each piece of work that it reports.

Used by measure_build.py and real_size_check.py. Linux only: everything is read from /proc.
"""

from __future__ import annotations

import os
import platform
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from dgcompile import __version__

INTERVAL = 0.1
"""Seconds between two looks at the processes. Memory that is taken and given back in between is not seen."""

DONE = re.compile(r"(?P<label>.+): done in (?:(?P<h>\d+) h ?)?(?:(?P<min>\d+) min ?)?(?:(?P<s>[\d.]+) s)?\s*")
"""The line in which dgcompile says that a piece of work is done, where its output is no terminal."""


class Sample(NamedTuple):
    """What all processes together had at one moment.

    Attributes:
        at: seconds since the start.
        own: bytes of memory that belong to no file (anonymous and shared); only these cannot be dropped.
        mapped: resident bytes of mapped files, counted in each process that maps them.
        read: bytes that were asked for so far, from files and pipes, cached or not.
        written: bytes that were sent towards a disk so far.
    """

    at: float
    own: int
    mapped: int
    read: int
    written: int

    @property
    def resident(self) -> int:
        """Resident bytes, those of files included."""
        return self.own + self.mapped


@dataclass(frozen=True)
class Part:
    """A piece of work that the command reported, or the whole command. Bytes; see :class:`Sample`."""

    seconds: float
    resident: int
    own: int
    mapped: int
    read: int
    written: int

    def to_values(self) -> dict[str, float]:
        """As JSON data."""
        return {
            "seconds": round(self.seconds, 1),
            "peak_resident_bytes": self.resident,
            "peak_own_bytes": self.own,
            "peak_mapped_bytes": self.mapped,
            "read_bytes": self.read,
            "written_bytes": self.written,
        }


@dataclass(frozen=True)
class Measured:
    """A finished command.

    Attributes:
        command: its words.
        exit_code: negative: the signal that ended it.
        output: what it wrote to stdout.
        errors: what it wrote to stderr.
        whole: all of it.
        parts: each piece of work that it reported, in the order of their ends. One label may have come several times:
            then seconds and bytes are sums. Work inside of other work counts in both.
    """

    command: tuple[str, ...]
    exit_code: int
    output: str
    errors: str
    whole: Part
    parts: Mapping[str, Part]

    def to_values(self) -> dict[str, Any]:
        """As JSON data."""
        return {
            "exit_code": self.exit_code,
            **self.whole.to_values(),
            "parts": {label: part.to_values() for label, part in self.parts.items()},
        }


def measure(
    command: Sequence[str],
    *,
    echo: bool = False,
    stop_when: Callable[[], bool] = lambda: False,
    environment: Mapping[str, str] | None = None,
) -> Measured:
    """Runs a command and measures it.

    Args:
        command: its words.
        echo: pass its stderr on while it runs.
        stop_when: asked at every look at the processes; once it says so, all of them are killed (SIGKILL).
        environment: variables besides this process's own.
    """
    started = time.monotonic()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {})},
        start_new_session=True,  # so that one signal reaches its workers too
    )
    output: list[str] = []
    log = _Log(started, echo)
    assert process.stdout is not None and process.stderr is not None
    readers = [
        threading.Thread(target=output.extend, args=(process.stdout,)),
        threading.Thread(target=log.extend, args=(process.stderr,)),
    ]
    for reader in readers:
        reader.start()
    samples: list[Sample] = []
    try:
        while process.poll() is None:
            if (sample := _sample(process.pid, time.monotonic() - started)) is not None:
                samples.append(sample)
            if stop_when():
                os.killpg(process.pid, signal.SIGKILL)
                break
            time.sleep(INTERVAL)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    finally:
        process.wait()
        for reader in readers:
            reader.join()
    seconds = time.monotonic() - started
    return Measured(
        tuple(command),
        process.returncode,
        "".join(output),
        "".join(log.lines),
        _part(samples, [(0.0, seconds)]),
        {label: _part(samples, spans) for label, spans in log.spans.items()},
    )


def seconds_of(done: re.Match[str]) -> float:
    """The time that a line :data:`DONE` names."""
    return 3600 * int(done["h"] or 0) + 60 * int(done["min"] or 0) + float(done["s"] or 0)


def machine() -> dict[str, Any]:
    """What measurements depend on: this machine, and which dgcompile it has."""
    return {
        "dgcompile": __version__,
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
    }


@dataclass
class _Log:
    """The lines of stderr, and when the work that they name began and ended."""

    started: float
    echo: bool
    lines: list[str] = field(default_factory=list)
    spans: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def extend(self, lines: Any) -> None:
        for line in lines:
            if self.echo:
                print(line, end="", file=sys.stderr, flush=True)
            self.lines.append(line)
            if found := DONE.fullmatch(line):
                end = time.monotonic() - self.started
                begin = max(0.0, end - seconds_of(found))
                self.spans.setdefault(found["label"], []).append((begin, end))


def _part(samples: Sequence[Sample], spans: Sequence[tuple[float, float]]) -> Part:
    """Peaks and sums over some spans of time. What happened between two samples counts to the later one's span."""
    seconds = sum(end - begin for begin, end in spans)
    inside = [sample for sample in samples if any(begin <= sample.at <= end + INTERVAL for begin, end in spans)]
    read = written = 0
    for begin, end in spans:
        read += _grown([(sample.at, sample.read) for sample in samples], begin, end)
        written += _grown([(sample.at, sample.written) for sample in samples], begin, end)
    return Part(
        seconds,
        max((sample.resident for sample in inside), default=0),
        max((sample.own for sample in inside), default=0),
        max((sample.mapped for sample in inside), default=0),
        read,
        written,
    )


def _grown(totals: Sequence[tuple[float, int]], begin: float, end: float) -> int:
    before = max((total for at, total in totals if at < begin), default=0)
    after = max((total for at, total in totals if at <= end + INTERVAL), default=0)
    return max(0, after - before)


def _sample(root: int, at: float) -> Sample | None:
    """The processes now; None when there are none left."""
    own = mapped = read = written = 0
    seen = False
    for pid in _tree(root):
        try:
            status = _fields(Path(f"/proc/{pid}/status"))
            # That of a process includes its finished children's.
            io = _fields(Path(f"/proc/{pid}/io"))
        except OSError:
            continue
        if "RssAnon" not in status:
            continue  # it ended, and nobody has asked for its exit code yet
        seen = True
        own += 1024 * (status["RssAnon"] + status["RssShmem"])
        mapped += 1024 * status["RssFile"]
        read += io["rchar"]
        written += io["write_bytes"]
    return Sample(at, own, mapped, read, written) if seen else None


def _fields(file: Path) -> dict[str, int]:
    """The lines ``name: number`` of a file in /proc."""
    found = re.findall(r"^(\w+):\s+(\d+)(?: kB)?$", file.read_text(), re.MULTILINE)
    return {name: int(number) for name, number in found}


def _tree(root: int) -> list[int]:
    """A process and all its descendants."""
    found = [root]
    for pid in found:
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            try:
                found.extend(map(int, children.read_text().split()))
            except OSError:
                continue
    return found
