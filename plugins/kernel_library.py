"""A folder of compiled kernels, ``kernels/sm<SM>/``: cubins and ``index.json``, which says what each of them is.

Read with nothing but the standard library: neither Triton nor CUDA is needed to plan with it or to check it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dgcompile.errors import BundleError
from dgcompile.plugins.launch import Launch

INDEX_FILE = "index.json"
FORMAT_VERSION = 1
"""Raised when an older program would misread an index."""

_MAX_INDEX_BYTES = 16 << 20
_MAX_CUBIN_BYTES = 64 << 20
_REBUILD = "build the bundle again"


def library_folder(sm: int) -> str:
    """Name of the folder of kernels for compute capability ``sm`` (major * 10 + minor) in a bundle."""
    return f"kernels/sm{sm}"


@dataclass(frozen=True)
class KernelRecord:
    """One cubin.

    Attributes:
        key: of the launches that it serves, see :attr:`~dgcompile.plugins.launch.Launch.key`.
        sha256: of the cubin, in hexadecimal.
        size: of the cubin in bytes.
        entry: name of the function in the cubin.
        parameters: run-time arguments that it takes; two null pointers follow them.
        threads: threads in a block.
        shared_bytes: dynamic shared memory of a launch.
        registers: registers of a thread.
        spilled_bytes: memory of a thread that takes what registers do not hold.
    """

    key: str
    sha256: str
    size: int
    entry: str
    parameters: int
    threads: int
    shared_bytes: int
    registers: int
    spilled_bytes: int

    @property
    def file(self) -> str:
        """Name of the cubin in the library's folder."""
        return f"{self.key}.cubin"


def index_bytes(sm: int, compiler: str, records: Iterable[KernelRecord]) -> bytes:
    """The index of a library as it lies on disk.

    Args:
        sm: compute capability of all kernels.
        compiler: what they were compiled by and from; the same text promises the same bytes.
        records: of the kernels.
    """
    ordered = sorted(records, key=lambda record: record.key)
    content = {
        "format": FORMAT_VERSION,
        "sm": sm,
        "compiler": compiler,
        "kernels": [asdict(record) for record in ordered],
    }
    return (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()


def cubin_sm(cubin: bytes) -> int | None:
    """Compute capability that a cubin was assembled for, from its ELF header; None for what is no cubin."""
    if len(cubin) < 64 or cubin[:5] != b"\x7fELF\x02" or int.from_bytes(cubin[18:20], "little") != 190:
        return None
    flags = int.from_bytes(cubin[48:52], "little")
    # Up to CUDA 12 the lowest byte; in the newer ABI (EI_OSABI 0x41) the one above it.
    return flags >> 8 & 0xFF if cubin[7] == 0x41 else flags & 0xFF


def check_cubin(cubin: bytes, record: KernelRecord, sm: int, where: str) -> None:
    """Refuses bytes that are not the recorded kernel for ``sm``.

    Raises:
        BundleError: size, hash or compute capability are others; ``where`` names the file.
    """
    if len(cubin) != record.size or hashlib.sha256(cubin).hexdigest() != record.sha256:
        raise BundleError(f"{where} is damaged: {len(cubin)} bytes that are not those its index recorded", fix=_REBUILD)
    found = cubin_sm(cubin)
    if found != sm:
        actual = "no cubin" if found is None else f"for compute capability {found / 10}"
        raise BundleError(f"{where} is {actual}", expected=f"one for {sm / 10}", fix=_REBUILD)


@dataclass(frozen=True)
class KernelLibrary:
    """An opened library.

    Attributes:
        folder: where it lies.
        sm: compute capability of its kernels, major * 10 + minor.
        digest: SHA-256 of its index, and so of everything in it, in hexadecimal.
        compiler: see :func:`index_bytes`.
        records: by key.
    """

    folder: Path
    sm: int
    digest: str
    compiler: str
    records: Mapping[str, KernelRecord]

    @classmethod
    def open(cls, folder: Path, sm: int) -> KernelLibrary:
        """Reads the index of a library. Cubins are read and checked when they are asked for.

        Args:
            folder: see :func:`library_folder`.
            sm: compute capability that is wanted.

        Raises:
            BundleError: the index is missing, malformed or of a newer format, or its kernels are for another GPU.
        """
        path = folder / INDEX_FILE
        data = _read(path, _MAX_INDEX_BYTES)
        try:
            content = json.loads(data)
        except (ValueError, RecursionError) as problem:
            raise BundleError(f"{path} is no JSON ({problem})", fix=_REBUILD) from problem
        version = content.get("format") if isinstance(content, dict) else None
        if not isinstance(version, int) or isinstance(version, bool) or version < 1:
            raise BundleError(f"{path} has format {version!r}", expected=f"{FORMAT_VERSION}", fix=_REBUILD)
        if version > FORMAT_VERSION:
            raise BundleError(
                f"{path} has format {version}, from a newer dgcompile",
                expected=f"at most {FORMAT_VERSION}",
                fix="install that version, or build the bundle again",
            )
        if content.get("sm") != sm:
            raise BundleError(
                f"{path}: kernels for compute capability {content.get('sm')!r}", expected=f"{sm}", fix=_REBUILD
            )
        try:
            records = [_record(entry) for entry in content["kernels"]]
            compiler = str(content["compiler"])
        except (KeyError, TypeError, ValueError) as problem:
            raise BundleError(f"{path} is malformed ({problem})", fix=_REBUILD) from problem
        return cls(folder, sm, hashlib.sha256(data).hexdigest(), compiler, {record.key: record for record in records})

    def __contains__(self, launch: Launch) -> bool:
        return launch.key in self.records

    def record(self, launch: Launch) -> KernelRecord:
        """What the library knows about the kernel of a launch.

        Raises:
            BundleError: it has no such kernel; says which one.
        """
        found = self.records.get(launch.key)
        if found is None:
            constants = ", ".join(f"{name} {value}" for name, value in sorted(launch.constants.items()))
            raise BundleError(
                f"{self.folder} has no kernel {launch.key} ({launch.kernel}; {', '.join(launch.types)}; {constants})",
                expected="one of the kernels that it was built with: the model or batch is another than at the build, "
                "or dgcompile is",
                fix=_REBUILD,
            )
        if found.parameters != len(launch.arguments):
            raise BundleError(
                f"{self.folder}: kernel {launch.key} takes {found.parameters} arguments",
                expected=f"{len(launch.arguments)}",
                fix=_REBUILD,
            )
        return found

    def cubin(self, record: KernelRecord) -> bytes:
        """The kernel itself, checked.

        Raises:
            BundleError: the file is missing, damaged or for another GPU.
        """
        path = self.folder / record.file
        data = _read(path, _MAX_CUBIN_BYTES)
        check_cubin(data, record, self.sm, str(path))
        return data


def _read(path: Path, limit: int) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as problem:
        raise BundleError(f"{path} cannot be read ({problem.strerror})", fix=_REBUILD) from problem
    if len(data) > limit:
        raise BundleError(f"{path} is larger than {limit} bytes", fix=_REBUILD)
    return data


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _record(entry: dict[str, Any]) -> KernelRecord:
    record = KernelRecord(**entry)
    # The key becomes a file name: it must not leave the folder.
    if not isinstance(record.key, str) or not re.fullmatch(r"\w+-[0-9a-f]{16}", record.key, re.ASCII):
        raise ValueError(f"{record.key!r} is no key of a kernel")
    if not isinstance(record.entry, str) or not re.fullmatch(r"\w+", record.entry, re.ASCII):
        raise ValueError(f"{record.entry!r} is no name of a function")
    numbers = [value for name, value in asdict(record).items() if name not in ("key", "sha256", "entry")]
    if not all(_is_number(value) and 0 <= value < 2**31 for value in numbers):
        raise ValueError(f"{record.key}: expected numbers, found {numbers}")
    if not 32 <= record.threads <= 1024 or record.threads % 32:
        raise ValueError(f"{record.key}: {record.threads} threads")
    return record
