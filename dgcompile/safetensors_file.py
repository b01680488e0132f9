"""The safetensors container: reading its header without trusting it, and laying out a new file. No torch.

Format (https://huggingface.co/docs/safetensors): 8 bytes little-endian header length, a JSON object
``{name: {"dtype", "shape", "data_offsets": [begin, end]}}``, then the tensors' bytes without gaps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dgcompile.config_file import parse_json, require_file
from dgcompile.errors import CheckpointError, DgcompileError

MAX_HEADER_BYTES = 100_000_000
"""Longest header that is read: the limit of the safetensors library itself."""

ALIGNMENT = 64
"""Tensor data of files laid out here starts at a multiple of this: a cache line, and enough for any vector load."""

DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
"""Bits of one element, per dtype of the safetensors format."""


class StoredTensor(NamedTuple):
    """Where a tensor lies on disk.

    Attributes:
        file: the file that holds it.
        dtype: in safetensors' spelling, such as "BF16".
        shape: its axes.
        offset: of its first byte, from the start of the file (not of the data section).
        nbytes: its length.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def tensor_nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor; ``dtype`` must be a key of :data:`DTYPE_BITS`."""
    return math.prod(shape) * DTYPE_BITS[dtype] // 8


def read_header(file: Path, *, error: type[DgcompileError] = CheckpointError) -> dict[str, StoredTensor]:
    """Reads and checks the header of a safetensors file; the tensors' bytes are not touched.

    Args:
        file: the file, or a symlink to it.
        error: class of the exceptions, for files that are not part of a checkpoint.

    Returns:
        The tensors in the order of their bytes.

    Raises:
        DgcompileError: (``error``) a file that is missing, truncated or too long, or a header whose entries are
            malformed, overlap, leave gaps or point outside the file. Names the file and the tensor, if there is one.
    """
    try:
        require_file(file, error=error)
        with file.open("rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(0)
            prefix = stream.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > size - 8:
                raise error(f"{file} is truncated: its {size} bytes do not hold its header", fix="fetch the file again")
            if length > MAX_HEADER_BYTES:
                raise error(f"{file} has a header of {length} bytes", expected=f"at most {MAX_HEADER_BYTES} bytes")
            text = stream.read(length)
    except OSError as problem:
        raise error(f"{file} cannot be read: {problem.strerror}") from problem

    header = parse_json(text, f"header of {file}", error=error)
    header.pop("__metadata__", None)
    data_start, data_end = 8 + length, size
    tensors = {name: _checked_entry(name, entry, file, data_start, error) for name, entry in header.items()}
    ordered = sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes))
    end, before = data_start, "the header"
    for name, tensor in ordered:
        if tensor.offset != end:
            what = "overlaps" if tensor.offset < end else "leaves a gap after"
            raise error(f"{name} in {file} {what} {before}", expected="tensors that follow one another without gaps")
        end, before = tensor.offset + tensor.nbytes, name
        if end > data_end:
            raise error(
                f"{name} in {file} ends at byte {end} but the file has {data_end} bytes: it is truncated",
                fix="fetch the file again",
            )
    if end != data_end:
        raise error(f"{file} has {data_end - end} bytes after its last tensor, {before}", fix="fetch the file again")
    return dict(ordered)


def _checked_entry(name: str, entry: Any, file: Path, data_start: int, error: type[DgcompileError]) -> StoredTensor:
    """One header entry with absolute offsets, its three fields checked against one another."""

    def refuse(problem: str, expected: str) -> DgcompileError:
        return error(f"{name} in {file} {problem}", expected=expected)

    if not name.isprintable():
        # An escape sequence must not reach the terminal.
        raise error(f"{file} has a tensor named {name!r}", expected="a printable name")
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise refuse("has a malformed header entry", "dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise refuse(f"has the unknown dtype {dtype!r}", f"one of {', '.join(DTYPE_BITS)}")
    if not _are_sizes(shape):
        raise refuse(f"has the shape {shape!r}", "a list of integers that are not negative")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise refuse(f"has the data_offsets {offsets!r}", "[begin, end] with begin <= end")
    nbytes = offsets[1] - offsets[0]
    if math.prod(shape) * DTYPE_BITS[dtype] != 8 * nbytes:
        raise refuse(f"has {nbytes} bytes for shape {shape} of {dtype}", f"{tensor_nbytes(dtype, shape)} bytes")
    return StoredTensor(file, dtype, tuple(shape), data_start + offsets[0], nbytes)


def _are_sizes(value: Any) -> bool:
    # bool is an int to Python, but not to the format.
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def lay_out(file: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[bytes, dict[str, StoredTensor]]:
    """Plans a new file.

    The format allows no gaps, so alignment comes from the order: tensors whose size is a multiple of
    :data:`ALIGNMENT` first, then those of smaller and smaller powers of two. Every tensor then starts at a multiple of
    the largest power of two (up to :data:`ALIGNMENT`) that divides its own size. Within a group the given order stays.

    Args:
        file: goes into the result.
        tensors: dtype and shape of each tensor, none of them empty.

    Returns:
        The file's first bytes (length, header, padding) and where each tensor goes, in the order of their bytes.
    """
    sizes = {name: tensor_nbytes(dtype, shape) for name, (dtype, shape) in tensors.items()}
    order = sorted(tensors, key=lambda name: -min(sizes[name] & -sizes[name], ALIGNMENT))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name in order:
        dtype, shape = tensors[name]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, begin + sizes[name]]}
        begin += sizes[name]
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    # The format lets a header end in spaces, for this purpose.
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    head = len(text).to_bytes(8, "little") + text
    planned = {
        name: StoredTensor(file, *tensors[name], len(head) + header[name]["data_offsets"][0], sizes[name])
        for name in order
    }
    return head, planned
