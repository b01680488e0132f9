"""Compiles a set of launches into a folder of kernels, in several processes at once. Needs Triton, no GPU."""

from __future__ import annotations

import functools
import hashlib
import json
import multiprocessing
import os
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from dgcompile.errors import BundleError, StageError
from dgcompile.files import write_atomically
from dgcompile.plugins.compile import CompiledKernel, compile_launch
from dgcompile.plugins.launch import Launch
from dgcompile.plugins.library import INDEX_FILE, KernelLibrary, KernelRecord, check_cubin, index_bytes
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
    except (OSError, ValueError, TypeError):
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


def _compile_all(launches: list[Launch], sm: int, workers: int) -> Iterable[tuple[Launch, CompiledKernel]]:
    """Each launch with its kernel, as they get ready."""
    if not launches:
        return
    # Not forked: the caller may have threads, and torch's or CUDA's state does not survive a fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(launches)), mp_context=context) as pool:
        waiting = {pool.submit(compile_launch, launch, sm): launch for launch in launches}
        try:
            while waiting:
                ready, _ = wait(waiting, return_when=FIRST_COMPLETED)
                for future in ready:
                    launch = waiting.pop(future)
                    problem = future.exception()
                    if problem is not None:
                        raise StageError(
                            f"kernel {launch.key} ({launch.kernel}, {dict(launch.constants)}) does not compile for "
                            f"compute capability {sm / 10}: {problem}"
                        ) from problem
                    yield launch, future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


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
