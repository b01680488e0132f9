"""The folder of kernels as a reader finds it: everything foreign, damaged or missing is refused by name. No Triton."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dgcompile.errors import BundleError
from dgcompile.plugins.kernel_library import INDEX_FILE, KernelLibrary, KernelRecord, cubin_sm
from dgcompile.plugins.launch import Launch
from tests.plugins.test_cuda_launch import fake_cubin, write_library

LAUNCH = Launch("moe.kernel.combine_kernel", ("outer", 3), ("*bf16:16", "i32"), {"TOP_K": 8}, (1, 1, 1))


@pytest.fixture
def library(tmp_path: Path) -> KernelLibrary:
    return write_library(tmp_path, [LAUNCH])


def record(library: KernelLibrary) -> KernelRecord:
    return library.record(LAUNCH)


def test_what_was_written_is_read(library: KernelLibrary) -> None:
    assert LAUNCH in library
    assert record(library).file == f"{LAUNCH.key}.cubin"
    assert library.cubin(record(library)) == fake_cubin(120, LAUNCH.key)
    assert KernelLibrary.open(library.folder, 120).digest == library.digest


def test_the_digest_follows_the_kernels(tmp_path: Path, library: KernelLibrary) -> None:
    other = tmp_path / "other"
    other.mkdir()
    assert write_library(other, [LAUNCH], shared_bytes=1).digest != library.digest


def change(field: str, value: Any) -> Any:
    return lambda index: index["kernels"][0].__setitem__(field, value)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda index: index.__setitem__("format", 2), "format 2, from a newer dgcompile; expected at most 1"),
        (lambda index: index.__setitem__("format", "1"), "format '1'"),
        (lambda index: index.__setitem__("format", True), "format True"),
        (lambda index: index.pop("format"), "format None"),
        (lambda index: index.__setitem__("sm", 90), "kernels for compute capability 90; expected 120"),
        (lambda index: index.pop("kernels"), "malformed"),
        (lambda index: index.__setitem__("kernels", [3]), "malformed"),
        (change("key", "../../etc/passwd-0123456789abcdef"), "no key of a kernel"),
        (change("key", None), "no key of a kernel"),
        (change("entry", "a b"), "no name of a function"),
        (change("threads", 2048), "2048 threads"),
        (change("threads", 33), "33 threads"),
        (change("shared_bytes", -1), "expected numbers"),
        (change("shared_bytes", "5"), "expected numbers"),
        (lambda index: index["kernels"][0].pop("size"), "malformed"),
        (change("surprise", 1), "malformed"),
    ],
)
def test_an_index_that_is_refused(edit: Any, message: str, library: KernelLibrary) -> None:
    path = library.folder / INDEX_FILE
    index = json.loads(path.read_bytes())
    edit(index)
    path.write_text(json.dumps(index))
    with pytest.raises(BundleError, match=message):
        KernelLibrary.open(library.folder, 120)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b"null"])
def test_an_index_that_is_no_index(content: bytes, library: KernelLibrary) -> None:
    (library.folder / INDEX_FILE).write_bytes(content)
    with pytest.raises(BundleError, match=INDEX_FILE):
        KernelLibrary.open(library.folder, 120)


def test_no_index(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="cannot be read"):
        KernelLibrary.open(tmp_path / "nowhere", 120)


def test_another_gpu_is_refused_by_the_index(library: KernelLibrary) -> None:
    with pytest.raises(BundleError, match="compute capability 120; expected 90"):
        KernelLibrary.open(library.folder, 90)


def test_another_gpu_is_refused_by_the_cubin_itself(library: KernelLibrary) -> None:
    """An index can claim anything; the assembler's own mark in the cubin counts."""
    path = library.folder / INDEX_FILE
    index = json.loads(path.read_bytes())
    cubin = fake_cubin(90, LAUNCH.key)
    index["kernels"][0]["sha256"] = hashlib.sha256(cubin).hexdigest()
    path.write_text(json.dumps(index))
    (library.folder / record(library).file).write_bytes(cubin)
    opened = KernelLibrary.open(library.folder, 120)
    with pytest.raises(BundleError, match=r"for compute capability 9\.0; expected one for 12\.0"):
        opened.cubin(record(opened))


def test_a_damaged_cubin(library: KernelLibrary) -> None:
    path = library.folder / record(library).file
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(BundleError, match="is damaged"):
        library.cubin(record(library))
    path.write_bytes(data[:-1])
    with pytest.raises(BundleError, match="is damaged"):
        library.cubin(record(library))
    path.unlink()
    with pytest.raises(BundleError, match="cannot be read"):
        library.cubin(record(library))


def test_a_kernel_that_is_not_there(library: KernelLibrary) -> None:
    other = Launch("moe.kernel.combine_kernel", ("outer", 3), ("*fp16:16", "i32"), {"TOP_K": 8}, (1, 1, 1))
    assert other not in library
    with pytest.raises(BundleError, match=rf"has no kernel {other.key} .*\*fp16.*TOP_K 8"):
        library.record(other)


def test_keys_follow_what_is_compiled_and_nothing_else() -> None:
    same = Launch("moe.kernel.combine_kernel", ("inner", 4), ("*bf16:16", "i32"), {"TOP_K": 8}, (9, 9, 9))
    assert same.key == LAUNCH.key
    for difference in ({"types": ("*bf16", "i32")}, {"constants": {"TOP_K": 4}}, {"warps": 8}, {"stages": 2}):
        values = {**LAUNCH.__dict__, **difference}
        assert Launch(**values).key != LAUNCH.key


@pytest.mark.parametrize("data", [b"", b"\x7fELF", b"\x7fELF\x02" + bytes(100), b"MZ" + bytes(100)])
def test_what_is_no_cubin(data: bytes) -> None:
    assert cubin_sm(data) is None


def test_reading_needs_the_standard_library_alone() -> None:
    code = (
        "import sys; import dgcompile.plugins.kernel_library, dgcompile.plugins.block_attention.plugin, "
        "dgcompile.plugins.moe.plugin; "
        "print(sorted({m.split('.')[0] for m in sys.modules} & "
        "{'torch', 'triton', 'onnx', 'transformers', 'pydantic', 'cuda', 'tensorrt', 'tensorrt_rtx'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_index_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    (tmp_path / INDEX_FILE).write_text("[" * 300_000)
    with pytest.raises(BundleError, match="is no JSON"):
        KernelLibrary.open(tmp_path, 120)
