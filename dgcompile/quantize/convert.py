"""Streaming conversion of a checkpoint's weights into a bundle's weights store.

Tensors are read, converted and written piece by piece in the order of the store, so memory is bounded by a piece, not
by a tensor or the model. A journal beside the partial file says which tensors are safely on disk: after a kill at any
moment the same call goes on there, and the finished file has the same bytes as an undisturbed conversion's.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch

from dgcompile import __version__
from dgcompile.checkpoint import READABLE_DTYPES, Checkpoint
from dgcompile.content_hashes import FileIdentity, file_identities, remember
from dgcompile.errors import CheckpointError, StageError
from dgcompile.files import PARTIAL_SUFFIX, sync_folder, write_atomically
from dgcompile.progress import Advance, Progress
from dgcompile.recipe import Recipe
from dgcompile.safetensors_file import DTYPE_BITS, StoredTensor
from dgcompile.weights_store import JOURNAL_FILE, WEIGHTS_FILE, store_layout

_PIECE_ELEMENTS = 4 << 20
_FLUSH_BYTES = 256 << 20


class ConvertedWeights(NamedTuple):
    """The finished store: SHA-256 (hexadecimal) and length of the file."""

    sha256: str
    nbytes: int


def convert_weights(
    checkpoint: Checkpoint,
    recipe: Recipe,
    folder: Path,
    progress: Progress | None = None,
    *,
    flush_bytes: int = _FLUSH_BYTES,
) -> ConvertedWeights:
    """Writes ``folder/weights.safetensors`` as ``plan_store`` lays it out.

    The bytes depend on the tensors and the recipe alone, not on the checkpoint's shards or on interruptions. As every
    source byte is read anyway, ``checkpoint.fingerprint()`` needs no further reading afterwards.

    Args:
        checkpoint: the source.
        recipe: the formats.
        folder: exists; nobody else writes to it meanwhile.
        progress: told the bytes written.
        flush_bytes: how much may be lost, and must be redone, when the machine or the process dies.

    Raises:
        CheckpointError: a weight is not finite, or a source file changed meanwhile; names tensor and file.
        StageError: the disk is too small, or the file system failed.
    """
    head, layout = store_layout(checkpoint.spec, recipe)
    identities = file_identities(checkpoint.tensors.values())
    nbytes = len(head) + sum(tensor.nbytes for tensor in layout.values())
    writer = _StoreWriter(folder, _conversion_key(checkpoint, recipe, head, identities))
    try:
        with (progress or Progress()).task("weights", nbytes, "bytes") as advance:
            source_hashes = writer.open(head, layout, nbytes, advance)
            waiting: dict[str, str] = {}
            for name, target in layout.items():
                if name in source_hashes:
                    continue
                source_hashes[name] = waiting[name] = _convert(name, checkpoint.tensors[name], target, writer, advance)
                if writer.unflushed >= flush_bytes:
                    writer.flush(waiting)
                    waiting = {}
            # Before the file gets its name: a source that changed meanwhile must not become a finished store.
            remember(checkpoint.tensors, source_hashes, identities)
            writer.finish()
    except OSError as problem:
        raise _disk_error(problem, folder, nbytes) from problem
    finally:
        writer.close()
    return ConvertedWeights(writer.sha256, nbytes)


def _conversion_key(
    checkpoint: Checkpoint, recipe: Recipe, head: bytes, identities: Mapping[Path, FileIdentity]
) -> str:
    """Identifies a conversion, so that a partial file of another one is never continued."""
    files = {file: list(identity) for file, identity in identities.items()}
    sources = {
        name: [files[tensor.file], tensor.dtype, tensor.offset] for name, tensor in sorted(checkpoint.tensors.items())
    }
    content = [__version__, recipe.model_dump(), sources]
    return hashlib.sha256(head + json.dumps(content, sort_keys=True).encode()).hexdigest()


def _convert(name: str, source: StoredTensor, target: StoredTensor, writer: _StoreWriter, advance: Advance) -> str:
    """Converts one tensor to the dtype of its place and appends it; returns the SHA-256 of its source bytes."""
    digest = hashlib.sha256()
    written = 0
    for piece in _pieces(name, source):
        digest.update(piece)
        values = torch.frombuffer(piece, dtype=getattr(torch, READABLE_DTYPES[source.dtype]))
        values = values.to(getattr(torch, READABLE_DTYPES[target.dtype]))
        if not bool(torch.isfinite(values).all()):
            raise CheckpointError(
                f"{name} in {source.file} holds NaN or infinity",
                expected="finite weights",
                fix="fetch the checkpoint again, or go back to one that was saved before training diverged",
            )
        data = values.view(torch.uint8).numpy().data
        writer.append(data)
        written += len(data)
        advance(len(data))
    assert written == target.nbytes, f"{name}: {written} bytes were written where {target.nbytes} were planned"
    return digest.hexdigest()


def _pieces(name: str, tensor: StoredTensor) -> Iterator[bytearray]:
    piece_bytes = _PIECE_ELEMENTS * DTYPE_BITS[tensor.dtype] // 8
    try:
        file = tensor.file.open("rb", buffering=0)
    except OSError as problem:
        raise CheckpointError(f"{name} in {tensor.file} cannot be read: {problem.strerror}") from problem
    with file:
        file.seek(tensor.offset)
        left = tensor.nbytes
        while left:
            piece = bytearray(min(left, piece_bytes))
            view, filled = memoryview(piece), 0
            while filled < len(piece):
                try:
                    count = file.readinto(view[filled:])
                except OSError as problem:
                    raise CheckpointError(f"{name} in {tensor.file} cannot be read: {problem.strerror}") from problem
                if not count:
                    raise CheckpointError(f"{tensor.file} became shorter: {name} ends {left - filled} bytes early")
                filled += count
            left -= filled
            yield piece


class _StoreWriter:
    """The partial file and its journal."""

    def __init__(self, folder: Path, key: str) -> None:
        self._path = folder / WEIGHTS_FILE
        self._partial = folder / (WEIGHTS_FILE + PARTIAL_SUFFIX)
        self._journal_path = folder / JOURNAL_FILE
        self._key = key
        self._digest = hashlib.sha256()
        self._file: BinaryIO | None = None
        self._journal: BinaryIO | None = None
        self.unflushed = 0

    @property
    def sha256(self) -> str:
        """Of all bytes so far."""
        return self._digest.hexdigest()

    def open(self, head: bytes, layout: Mapping[str, StoredTensor], nbytes: int, advance: Advance) -> dict[str, str]:
        """Continues the partial file, or starts it; returns the source hashes of the tensors that it holds already."""
        done = self._finished_tensors(layout, nbytes)
        if done:
            self._file = self._partial.open("r+b")
            last = layout[list(done)[-1]]
            self._read_again(last.offset + last.nbytes, advance)
            self._rewrite_journal(done)
            return done
        self._journal_path.unlink(missing_ok=True)
        self._partial.unlink(missing_ok=True)
        if shutil.disk_usage(self._path.parent).free < nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._file = self._partial.open("w+b")
        try:
            _reserve(self._file.fileno(), nbytes)
        except OSError:
            # It may have taken all that was left.
            self._partial.unlink()
            raise
        self.append(head)
        advance(len(head))
        self._rewrite_journal({})
        return {}

    def append(self, data: bytes | memoryview) -> None:
        """Writes the next bytes of the store."""
        assert self._file is not None
        self._file.write(data)
        self._digest.update(data)
        self.unflushed += len(data)

    def flush(self, source_hashes: Mapping[str, str]) -> None:
        """Makes the tensors appended so far survive, then says so in the journal."""
        assert self._file is not None and self._journal is not None
        self._file.flush()
        os.fsync(self._file.fileno())
        for name, digest in source_hashes.items():
            self._journal.write(_line(_journal_entry(name, digest)))
        self._journal.flush()
        os.fsync(self._journal.fileno())
        self.unflushed = 0

    def finish(self) -> None:
        """Gives the complete file its name."""
        assert self._file is not None
        self._file.flush()
        os.fsync(self._file.fileno())
        self.close()
        self._partial.replace(self._path)
        sync_folder(self._path.parent)
        self._journal_path.unlink(missing_ok=True)

    def close(self) -> None:
        """Closes both files; what they hold stays for the next call."""
        for file in (self._file, self._journal):
            if file is not None:
                file.close()

    def _finished_tensors(self, layout: Mapping[str, StoredTensor], nbytes: int) -> dict[str, str]:
        """Source hashes of the leading tensors of the layout that the journal vouches for."""
        try:
            lines = self._journal_path.read_bytes().split(b"\n")
            if json.loads(lines[0]) != {"conversion": self._key} or self._partial.stat().st_size != nbytes:
                return {}
            # The kill may have cut the last line short: what follows the last line end does not count.
            entries = [json.loads(line) for line in lines[1:-1]]
            done = {entry["tensor"]: entry["source_sha256"] for entry in entries}
        except (OSError, ValueError, KeyError, TypeError):
            return {}
        return done if list(done) == list(layout)[: len(done)] else {}

    def _read_again(self, end: int, advance: Advance) -> None:
        """Leaves the file position at ``end``, with everything before it in the digest."""
        assert self._file is not None
        left = end
        while left:
            chunk = self._file.read(min(left, 8 << 20))
            if not chunk:
                raise OSError(errno.EIO, f"{self._partial} became shorter")
            self._digest.update(chunk)
            advance(len(chunk))
            left -= len(chunk)
        self._file.seek(end)

    def _rewrite_journal(self, done: Mapping[str, str]) -> None:
        lines = [{"conversion": self._key}, *(_journal_entry(name, digest) for name, digest in done.items())]
        write_atomically(self._journal_path, b"".join(map(_line, lines)))
        self._journal = self._journal_path.open("ab")


def _journal_entry(name: str, source_sha256: str) -> dict[str, str]:
    return {"tensor": name, "source_sha256": source_sha256}


def _line(value: Mapping[str, str]) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _reserve(handle: int, nbytes: int) -> None:
    """Claims the disk space at once, so that a disk that is too small is known before the work."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(handle, 0, nbytes)
    else:
        os.ftruncate(handle, nbytes)


def _disk_error(problem: OSError, folder: Path, nbytes: int) -> StageError:
    if problem.errno in (errno.ENOSPC, errno.EDQUOT):
        return StageError(
            f"{folder} has no room for {WEIGHTS_FILE}: it needs {nbytes:,} bytes, "
            f"{shutil.disk_usage(folder).free:,} are free",
            fix="free space or build elsewhere, then run the same command again",
        )
    return StageError(f"{folder / WEIGHTS_FILE} could not be written: {problem.strerror or problem}")
