"""SHA-256 of tensors in files that are too large to hash twice.

Hashes are remembered in the user's cache folder under the file's identity (device, inode, size, modification and change
time). No user program can write to a file without moving its change time, so a remembered hash is as good as a new one.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from dgcompile.errors import CheckpointError
from dgcompile.files import write_atomically
from dgcompile.progress import Progress
from dgcompile.safetensors_file import StoredTensor

_CHUNK_BYTES = 8 << 20
_THREADS = 4
_SETTLED_NS = 2_000_000_000
"""Younger files are not remembered: a second write might fall into the same tick of the file system's clock."""


class FileIdentity(NamedTuple):
    """What tells one state of a file from another without reading it."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, file: Path) -> FileIdentity:
        """Identity of a file as it is now (of a symlink's end)."""
        status = file.stat()
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    @property
    def settled(self) -> bool:
        """Whether any later write must change this identity."""
        return time.time_ns() - max(self.changed_ns, self.modified_ns) > _SETTLED_NS


def tensor_hashes(tensors: Mapping[str, StoredTensor], progress: Progress) -> dict[str, str]:
    """SHA-256 of each tensor's bytes in hexadecimal, remembered or computed.

    Raises:
        CheckpointError: a file that cannot be read, or that changed meanwhile.
    """
    identities = file_identities(tensors.values())
    known = {file: _remembered(identity) for file, identity in identities.items()}
    hashes = {
        name: known[tensor.file][_span(tensor)]
        for name, tensor in tensors.items()
        if _span(tensor) in known[tensor.file]
    }
    unknown = {name: tensor for name, tensor in tensors.items() if name not in hashes}
    if unknown:
        total = sum(tensor.nbytes for tensor in unknown.values())
        with progress.task("fingerprint", total, "bytes") as advance, ThreadPoolExecutor(_THREADS) as threads:
            # Hashing releases the interpreter's lock.
            for (name, tensor), digest in zip(unknown.items(), threads.map(_hash, unknown.values()), strict=True):
                hashes[name] = digest
                advance(tensor.nbytes)
        remember(tensors, hashes, identities)
    return hashes


def file_identities(tensors: Iterable[StoredTensor]) -> dict[Path, FileIdentity]:
    """Identity of each file that holds one of the tensors.

    Raises:
        CheckpointError: a file is gone.
    """
    try:
        return {file: FileIdentity.of(file) for file in sorted({tensor.file for tensor in tensors})}
    except OSError as problem:
        raise CheckpointError(f"{problem.filename} cannot be read: {problem.strerror}") from problem


def remember(
    tensors: Mapping[str, StoredTensor], hashes: Mapping[str, str], before: Mapping[Path, FileIdentity]
) -> None:
    """Keeps the hashes of tensors that were read completely.

    Args:
        tensors: where the tensors lie.
        hashes: SHA-256 by name, of some or all of them.
        before: identities of their files from before the reading.

    Raises:
        CheckpointError: a file changed since: what was read may be a mixture.
    """
    by_file: dict[Path, dict[str, str]] = defaultdict(dict)
    for name, digest in hashes.items():
        by_file[tensors[name].file][_span(tensors[name])] = digest
    after = file_identities(tensors.values())
    for file, spans in by_file.items():
        if after[file] != before[file]:
            raise CheckpointError(f"{file} changed while it was read", fix="run the command again when it is complete")
        if before[file].settled:
            _store(before[file], {**_remembered(before[file]), **spans})


def _span(tensor: StoredTensor) -> str:
    return f"{tensor.offset}+{tensor.nbytes}"


def _hash(tensor: StoredTensor) -> str:
    digest = hashlib.sha256()
    try:
        with tensor.file.open("rb", buffering=0) as file:
            file.seek(tensor.offset)
            left = tensor.nbytes
            while left and (chunk := file.read(min(left, _CHUNK_BYTES))):
                digest.update(chunk)
                left -= len(chunk)
    except OSError as problem:
        raise CheckpointError(f"{tensor.file} cannot be read: {problem.strerror}") from problem
    if left:
        raise CheckpointError(f"{tensor.file} changed while it was read: it ends {left} bytes early")
    return digest.hexdigest()


def _cache_file(identity: FileIdentity) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    name = "-".join(str(part) for part in identity)
    return Path(base).expanduser() / "dgcompile" / "hashes" / f"{name}.json"


def _remembered(identity: FileIdentity) -> dict[str, str]:
    try:
        stored = json.loads(_cache_file(identity).read_bytes())
    except (OSError, ValueError, RuntimeError):
        # Nothing there, damaged, or no home folder: a cache may always be empty.
        return {}
    return stored if isinstance(stored, dict) else {}


def _store(identity: FileIdentity, spans: Mapping[str, str]) -> None:
    try:
        file = _cache_file(identity)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(spans).encode())
    except (OSError, RuntimeError):
        # A read-only home costs time at the next build, not this one.
        return
