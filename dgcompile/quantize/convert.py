"""Streaming conversion of a checkpoint's weights into a bundle's weights store.

Weights are read, converted and written a slice at a time in the order of the store, so memory is bounded by a slice and
a weight's scales, not by the model. A journal beside the partial file says which tensors are safely on disk: after a
kill at any moment the same call goes on there, and the finished file has the same bytes as an undisturbed conversion's.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from dgcompile import __version__
from dgcompile.checkpoint import READABLE_DTYPES, Checkpoint
from dgcompile.content_hashes import FileIdentity, file_identities, remember
from dgcompile.errors import CheckpointError, StageError
from dgcompile.files import PARTIAL_SUFFIX, sync_folder, write_atomically
from dgcompile.plugins.moe.formats import FP8_MAX
from dgcompile.progress import Advance, Progress
from dgcompile.quantize.formats import FORMATS
from dgcompile.quantize.requantize import published_parts, refuse_second_rounding
from dgcompile.recipe import Recipe, weight_of
from dgcompile.safetensors_file import StoredTensor
from dgcompile.source_hash import source_hash
from dgcompile.weights_store import (
    JOURNAL_FILE,
    WEIGHTS_FILE,
    StoredWeight,
    lay_out_store,
    scale_dtype,
)

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
    input_amax: Mapping[str, float] | None = None,
    flush_bytes: int = _FLUSH_BYTES,
) -> ConvertedWeights:
    """Writes ``folder/weights.safetensors`` as :func:`dgcompile.weights_store.lay_out_store` lays it out.

    The bytes depend on the tensors and the recipe alone, not on the checkpoint's shards or on interruptions. As every
    source byte is read anyway, ``checkpoint.fingerprint()`` needs no further reading afterwards.

    Args:
        checkpoint: the source.
        recipe: the formats, for a target.
        input_amax: largest magnitude of the activations that each weight with a static scale is multiplied with.
        folder: exists; nobody else writes to it meanwhile.
        progress: told the bytes written.
        flush_bytes: how much may be lost, and must be redone, when the machine or the process dies.

    Raises:
        CheckpointError: a weight is not finite or too large for its format, or a source file changed meanwhile; names
            tensor and file.
        RecipeError: weights that the checkpoint has in FP8 would be rounded to yet another format.
        StageError: the disk is too small, or the file system failed.
    """
    refuse_second_rounding(checkpoint, recipe)
    store = lay_out_store(checkpoint.spec, recipe)
    nbytes = store.nbytes
    stored = checkpoint.stored
    identities = file_identities(stored.values())
    amax = input_amax or {}
    writer = _StoreWriter(folder, _conversion_key(checkpoint, recipe, store.head, identities, amax))
    try:
        with (progress or Progress()).task("weights", nbytes, "bytes") as advance:
            done = writer.open(store.head, store.tensors, nbytes, advance)
            source_hashes = {name: digest for name, digest in done.items() if digest}
            made = _Conversion(checkpoint, recipe, store.weights, amax, set(store.tensors) - set(done))
            waiting: dict[str, str] = {}
            for name, place in store.tensors.items():
                if name in done:
                    continue
                written = 0
                for data in made.bytes_of(name):
                    writer.append(data)
                    written += len(data)
                    advance(len(data))
                assert written == place.nbytes, f"{name}: {written} bytes instead of the planned {place.nbytes}"
                waiting[name] = made.source_hashes.get(name, "")
                if writer.unflushed >= flush_bytes:
                    writer.flush(waiting)
                    waiting = {}
            source_hashes |= made.source_hashes
            # Before the file gets its name: a source that changed meanwhile must not become a finished store.
            remember(stored, source_hashes, identities)
            writer.finish()
    except OSError as problem:
        raise _disk_error(problem, folder, nbytes) from problem
    finally:
        writer.close()
    return ConvertedWeights(writer.sha256, nbytes)


def _conversion_key(
    checkpoint: Checkpoint,
    recipe: Recipe,
    head: bytes,
    identities: Mapping[Path, FileIdentity],
    input_amax: Mapping[str, float],
) -> str:
    """Identifies a conversion, so that a partial file of another one is never continued."""
    files = {file: list(identity) for file, identity in identities.items()}
    sources = {
        name: [files[tensor.file], tensor.dtype, tensor.offset] for name, tensor in sorted(checkpoint.stored.items())
    }
    content = [
        __version__,
        source_hash("dgcompile.quantize.convert"),
        source_hash("dgcompile.quantize.formats"),
        source_hash("dgcompile.quantize.requantize"),
        torch.__version__,
        recipe.model_dump(),
        sources,
    ]
    ranges = sorted(input_amax.items())
    return hashlib.sha256(head + json.dumps([*content, ranges], sort_keys=True).encode()).hexdigest()


class _Conversion:
    """Makes the store's tensors in the order in which they are asked for.

    A weight's first tensor is passed on slice by slice; its others are kept until they are asked for. In a store they
    follow at once unless their sizes put them into another group of the layout, which happens to small ones only.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        recipe: Recipe,
        weights: Mapping[str, StoredWeight],
        amax: Mapping[str, float],
        wanted: set[str],
    ) -> None:
        self._checkpoint = checkpoint
        self._scale_dtype = scale_dtype(recipe)
        self._weights = weights
        self._amax = amax
        self._wanted = wanted
        self._owner = {part: name for name, weight in weights.items() for part in weight.parts.values()}
        self._kept: dict[str, list[memoryview]] = {}
        self.source_hashes: dict[str, str] = {}

    def bytes_of(self, name: str) -> Iterator[memoryview]:
        """The bytes of one tensor of the store, in pieces."""
        if name in self._kept:
            yield from self._kept.pop(name)
        elif name in self._owner:
            yield from self._convert(self._owner[name], name)
        else:
            yield self._input_scale(name)

    def _convert(self, name: str, wanted: str) -> Iterator[memoryview]:
        weight = self._weights[name]
        kept: dict[str, list[memoryview]] = {
            part: [] for part in weight.parts.values() if part != wanted and part in self._wanted
        }
        try:
            for parts in self._encoded(name, weight):
                for suffix, part in weight.parts.items():
                    data = parts[suffix].contiguous().view(torch.uint8).numpy().reshape(-1).data
                    if part == wanted:
                        yield data
                    elif part in kept:
                        kept[part].append(data)
        except ValueError as problem:
            raise CheckpointError(
                f"{name} in {self._file(name)} does not fit {weight.recipe.text}: {problem}",
                fix="choose a recipe that stores this class of weight otherwise",
            ) from problem
        self._kept |= kept

    def _encoded(self, name: str, weight: StoredWeight) -> Iterator[dict[str, Tensor]]:
        """The parts of a weight, slice by slice."""
        if name in self._checkpoint.quantized:
            yield from published_parts(self._checkpoint.quantized[name], weight.recipe, self.source_hashes)
            return
        source, digest = self._checkpoint.tensors[name], hashlib.sha256()
        number_format = FORMATS[weight.recipe.format]
        for piece in _slices(name, source):
            digest.update(piece)
            values = torch.frombuffer(piece, dtype=getattr(torch, READABLE_DTYPES[source.dtype]))
            values = values.view(-1, *source.shape[1:])
            if not bool(values.isfinite().all()):
                raise CheckpointError(
                    f"{name} in {source.file} holds NaN or infinity",
                    expected="finite weights",
                    fix="fetch the checkpoint again, or go back to one that was saved before training diverged",
                )
            yield number_format.encode(values, weight.recipe.group_size, self._scale_dtype)
        self.source_hashes[name] = digest.hexdigest()

    def _file(self, name: str) -> Path:
        quantized = self._checkpoint.quantized.get(name)
        return quantized.parts[0].codes.file if quantized else self._checkpoint.tensors[name].file

    def _input_scale(self, name: str) -> memoryview:
        """A static scale: what brings the largest activation that calibration saw to the largest E4M3 number."""
        weight = weight_of(name)
        if weight not in self._amax:
            raise StageError(f"the calibration has no range of the activations of {weight}")
        scale = torch.tensor([self._amax[weight] / FP8_MAX], dtype=torch.float32)
        return scale.view(torch.uint8).numpy().data


def _slices(name: str, tensor: StoredTensor) -> Iterator[bytearray]:
    """The bytes of a tensor, whole slices of its leading axis at a time."""
    slice_bytes = tensor.nbytes // tensor.shape[0]
    slice_elements = math.prod(tensor.shape[1:])
    piece_bytes = slice_bytes * max(1, _PIECE_ELEMENTS // slice_elements)
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
        """Continues the partial file, or starts it; returns the tensors that it holds already, each with the SHA-256 of
        its weight's source bytes ("" for a tensor that is not a weight's first one)."""
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
