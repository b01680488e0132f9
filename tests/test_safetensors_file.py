"""The safetensors container: files of the real library are read, lying headers are refused by tensor and file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from dgcompile.errors import BundleError, CheckpointError
from dgcompile.safetensors_file import ALIGNMENT, DTYPE_BITS, lay_out, read_header, tensor_nbytes


def entry(begin: Any, end: Any, shape: Any = (2,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape) if isinstance(shape, tuple) else shape, "data_offsets": [begin, end]}


def write(file: Path, header: Any, data: int) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(data))
    return file


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "a": numpy.arange(6, dtype=numpy.float32).reshape(2, 3),
        "b": numpy.ones(5, numpy.int8),
        "c": numpy.zeros((0, 4), numpy.float16),
        "scalar": numpy.array(7, numpy.int64),
    }
    save_file(values, tmp_path / "x.safetensors")
    tensors = read_header(tmp_path / "x.safetensors")
    data = (tmp_path / "x.safetensors").read_bytes()
    assert set(tensors) == set(values)
    for name, tensor in tensors.items():
        assert tensor.shape == values[name].shape
        assert data[tensor.offset : tensor.offset + tensor.nbytes] == values[name].tobytes()
    assert (tensors["a"].dtype, tensors["b"].dtype, tensors["c"].dtype) == ("F32", "I8", "F16")


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"w": entry(0, 8), "v": entry(4, 12)}, 12, "v in .*x.safetensors overlaps w"),
        ({"w": entry(0, 8), "v": entry(0, 8)}, 8, "v in .*x.safetensors overlaps w"),
        ({"w": entry(0, 8), "v": entry(12, 20)}, 20, "v in .*x.safetensors leaves a gap after w"),
        ({"w": entry(4, 12)}, 12, "w in .*x.safetensors leaves a gap after the header"),
        ({"w": entry(0, 8)}, 7, "w in .*x.safetensors ends at byte .* truncated"),
        ({"w": entry(0, 8)}, 9, "x.safetensors has 1 bytes after its last tensor, w"),
        ({"w": entry(0, 2**60, (2**58,))}, 8, "w in .*x.safetensors ends at byte"),
        ({"w": entry(0, 9)}, 9, "w in .*x.safetensors has 9 bytes for shape .* expected 8 bytes"),
        ({"w": entry(8, 0)}, 8, "w in .*x.safetensors has the data_offsets"),
        ({"w": entry(-8, 0)}, 8, "w in .*x.safetensors has the data_offsets"),
        ({"w": entry(0, 8.0)}, 8, "w in .*x.safetensors has the data_offsets"),
        ({"w": entry(False, 8)}, 8, "w in .*x.safetensors has the data_offsets"),
        ({"w": entry(0, 8, (-2, -1))}, 8, "w in .*x.safetensors has the shape"),
        ({"w": entry(0, 8, "2")}, 8, "w in .*x.safetensors has the shape"),
        ({"w": entry(0, 8, dtype="F33")}, 8, "w in .*x.safetensors has the unknown dtype 'F33'"),
        ({"w": entry(0, 8, dtype=["F32"])}, 8, "w in .*x.safetensors has the unknown dtype"),
        ({"w": {"dtype": "F32", "shape": [2]}}, 8, "w in .*x.safetensors has a malformed header entry"),
        ({"w": [0, 8]}, 8, "w in .*x.safetensors has a malformed header entry"),
        ({"w\x1b[31m": entry(0, 8)}, 8, r"x.safetensors has a tensor named 'w\\x1b\[31m'"),
        ({"w\ud800": entry(0, 8)}, 8, "x.safetensors has a tensor named"),
        ([], 0, "x.safetensors holds a list"),
        (b'{"w": {}, "w": {}}', 0, "x.safetensors: 'w' occurs twice"),
        (b"{", 0, "x.safetensors is not JSON"),
        (b"\xff", 0, "x.safetensors is not UTF-8"),
        (b"[" * 100_000, 0, "x.safetensors is nested too deeply"),
    ],
)
def test_lying_headers(tmp_path: Path, header: Any, data: int, message: str) -> None:
    file = write(tmp_path / "x.safetensors", header, data)
    with pytest.raises(CheckpointError, match=message):
        read_header(file)
    with pytest.raises(BundleError, match=message):
        read_header(file, error=BundleError)


@pytest.mark.parametrize("data", [b"", b"\x00" * 7, (2**63).to_bytes(8, "little"), (9).to_bytes(8, "little") + b"{}"])
def test_files_that_do_not_hold_their_header(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"x\.safetensors is truncated"):
        read_header(tmp_path / "x.safetensors")


def test_a_huge_header_is_refused_unread(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    with file.open("wb") as stream:
        stream.write((100_000_001).to_bytes(8, "little"))
        stream.truncate(200_000_000)  # sparse
    with pytest.raises(CheckpointError, match="has a header of 100000001 bytes"):
        read_header(file)


shapes = st.lists(st.integers(1, 9), max_size=3).map(tuple)
dtypes = st.sampled_from([dtype for dtype, bits in DTYPE_BITS.items() if bits >= 8])


@given(st.dictionaries(st.text("abé.0", min_size=1, max_size=4), st.tuples(dtypes, shapes), min_size=1, max_size=8))
def test_layouts_are_files_of_the_format(tmp_path_factory: pytest.TempPathFactory, tensors: Any) -> None:
    file = tmp_path_factory.mktemp("layout") / "x.safetensors"
    head, planned = lay_out(file, tensors)
    file.write_bytes(head + bytes(sum(tensor.nbytes for tensor in planned.values())))
    assert read_header(file) == planned
    with safe_open(file, "np") as opened:
        assert set(opened.keys()) == set(tensors)
    assert len(head) % ALIGNMENT == 0
    for tensor in planned.values():
        size = tensor_nbytes(tensor.dtype, tensor.shape)
        assert tensor.nbytes == size
        assert tensor.offset % min(ALIGNMENT, size & -size) == 0
