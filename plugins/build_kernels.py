"""Compiles a set of launches into a folder of kernels, in several processes at once. Needs Triton, no GPU."""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

from dgcompile.errors import BundleError, StageError
from dgcompile.files import write_atomically
from dgcompile.plugins import compile_worker
from dgcompile.plugins.compile import CompiledKernel
from dgcompile.plugins.kernel_library import INDEX_FILE, KernelLibrary, KernelRecord, check_cubin, index_bytes
from dgcompile.plugins.launch import Launch
from dgcompile.progress import Progress

JOURNAL_FILE = "kernels.partial"
"""What a killed build has finished: its compiler, then one record a line."""


def build_library(
    folder: Path, launches: Iterable[Launch], sm: int, progress: Progress, workers: int | None = None
) -> tuple[str, ...]:
    """Makes ``folder`` hold the kernels of all launches, and an index of them, written last.

    The result depends on nothing but the kernels' source, the compiler and the arguments. Cubins of an earlier build,
    finished or killed, are kept if the same compiler made them from the same source and their bytes are as recorded.

    Args:
        folder: created if missing. Cubins in it that no launch asks for are removed.
        launches: several may share a kernel.
        sm: compute capability, major * 10 + minor.
        progress: told of each kernel.
        workers: processes; as many as this process may use CPUs by default.

    Returns:
        Names of the files, sorted.

    Raises:
        StageError: a kernel does not compile.
        OSError: as the file system reports it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {launch.key: launch for launch in launches}
    compiler = compiler_version()
    done = {key: record for key, record in _reusable(folder, compiler, sm).items() if key in wanted}
    with (folder / JOURNAL_FILE).open("w") as journal, progress.task("kernels", len(wanted), "kernels") as advance:

        def finished(record: KernelRecord) -> None:
            journal.write(json.dumps(asdict(record)) + "\n")
            journal.flush()
            advance()

        journal.write(json.dumps({"compiler": compiler, "sm": sm}) + "\n")
        for record in done.values():
            finished(record)
        missing = [launch for key, launch in sorted(wanted.items()) if key not in done]
        for launch, compiled in _compile_all(missing, sm, workers or len(os.sched_getaffinity(0))):
            record = _record(launch, compiled)
            write_atomically(folder / record.file, compiled.cubin)
            done[record.key] = record
            finished(record)

    for stale in folder.glob("*.cubin"):
        if stale.stem not in wanted:
            stale.unlink()
    write_atomically(folder / INDEX_FILE, index_bytes(sm, compiler, done.values()))
    (folder / JOURNAL_FILE).unlink()
    return tuple(sorted([INDEX_FILE, *(record.file for record in done.values())]))


@functools.cache
def compiler_version() -> str:
    """Names what determines a cubin beside the launch: Triton's version and a hash of the plugins' source."""
    folder = Path(__file__).parent
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(file.relative_to(folder).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return f"triton {version('triton')}, source {digest.hexdigest()[:16]}"


def _reusable(folder: Path, compiler: str, sm: int) -> dict[str, KernelRecord]:
    """Records of the cubins in ``folder`` that need not be compiled again, by key."""
    records: list[KernelRecord] = []
    try:
        library = KernelLibrary.open(folder, sm)
        if library.compiler == compiler:
            records += library.records.values()
    except BundleError:
        pass
    try:
        head, *lines = (folder / JOURNAL_FILE).read_text().splitlines()
        if json.loads(head) == {"compiler": compiler, "sm": sm}:
            for line in lines:
                records.append(KernelRecord(**json.loads(line)))
    except (OSError, ValueError, TypeError, RecursionError):
        pass  # no journal, or its last line was being written when the build was killed

    found = {}
    for record in records:
        path = folder / record.file
        try:
            check_cubin(path.read_bytes(), record, sm, str(path))
        except (OSError, BundleError):
            continue
        found[record.key] = record
    return found


def _compile_all(launches: list[Launch], sm: int, workers: int) -> Iterator[tuple[Launch, CompiledKernel]]:
    """Each launch with its kernel, as they get ready: one thread for each worker process asks it for one at a time."""
    if not launches:
        return
    count = min(workers, len(launches))
    with contextlib.ExitStack() as stack:
        # Left last: once the workers are gone, nobody waits for them.
        pool = stack.enter_context(ThreadPoolExecutor(count))
        idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for _ in range(count):
            idle.put(stack.enter_context(_Worker.started(sm)))
        waiting = {pool.submit(_compile, idle, launch, sm): launch for launch in launches}
        try:
            for ready in as_completed(waiting):
                yield waiting[ready], ready.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _compile(idle: queue.SimpleQueue[_Worker], launch: Launch, sm: int) -> CompiledKernel:
    """Has the next idle worker compile a launch."""
    worker = idle.get()
    try:
        answer = worker.ask(asdict(launch))
    finally:
        # Even one that died: whoever waits for a worker then learns it at once.
        idle.put(worker)
    if "problem" in answer:
        raise StageError(
            f"kernel {launch.key} ({launch.kernel}, {dict(launch.constants)}) does not compile for compute capability "
            f"{sm / 10}: {answer['problem']}"
        )
    answer["cubin"] = base64.b64decode(answer["cubin"])
    answer["arguments"] = tuple(answer["arguments"])
    return CompiledKernel(**answer)


@dataclass(frozen=True)
class _Worker:
    """A process of compile_worker.py, and the file that holds what it says beside its answers."""

    process: subprocess.Popen[str]
    said: IO[str]

    @classmethod
    @contextlib.contextmanager
    def started(cls, sm: int) -> Iterator[_Worker]:
        """Starts one, and ends it afterwards."""
        # There would be nothing to compile in Triton's interpreter.
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        with tempfile.TemporaryFile("w+", errors="replace") as said:
            process = subprocess.Popen(
                [sys.executable, "-m", compile_worker.__name__, str(sm)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
                env=environment,
                # Ctrl-C is the build's to handle: it ends the workers.
                start_new_session=True,
            )
            try:
                yield cls(process, said)
            finally:
                process.kill()
                process.communicate()

    def ask(self, given: dict[str, Any]) -> dict[str, Any]:
        """The answer to one line."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(given) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except OSError:
            line = ""
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        self.said.seek(0)
        words = " ".join(self.said.read().split())[-400:]
        code = self.process.wait(timeout=30)
        ended = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        raise StageError(
            f"a process that compiled kernels {ended}: {words or 'it said nothing'}",
            fix="run the same command again: it goes on where it stopped (too little memory is the usual cause)",
        )


def _record(launch: Launch, compiled: CompiledKernel) -> KernelRecord:
    return KernelRecord(
        key=launch.key,
        sha256=hashlib.sha256(compiled.cubin).hexdigest(),
        size=len(compiled.cubin),
        entry=compiled.entry,
        parameters=len(compiled.arguments),
        threads=compiled.threads,
        shared_bytes=compiled.shared_bytes,
        registers=compiled.registers,
        spilled_bytes=compiled.spilled_bytes,
    )
