"""Compiling a folder of kernels: what a killed or repeated build leaves. The kernels are small, to be quick."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton (extra `build`) is not installed: NO kernel is compiled")

from dgcompile.errors import StageError
from dgcompile.plugins.build_kernels import JOURNAL_FILE, build_library
from dgcompile.plugins.kernel_library import INDEX_FILE, KernelLibrary, cubin_sm
from dgcompile.plugins.launch import Launch
from dgcompile.progress import Progress


def small_launches(count: int) -> list[Launch]:
    return [
        Launch(
            "moe.kernel.combine_kernel",
            ("outer", "expert_weights", "output"),
            ("*bf16:16", "*fp32:16", "*bf16:16"),
            {"TOP_K": top_k, "HIDDEN": 64, "BLOCK": 64},
            (1, 1, 1),
        )
        for top_k in range(1, count + 1)
    ]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("sm", [90, 120])
def test_a_library(sm: int, tmp_path: Path) -> None:
    launches = small_launches(2)
    files = build_library(tmp_path, [*launches, launches[0]], sm, Progress(), workers=1)
    assert (
        sorted(contents(tmp_path)) == list(files) == sorted([INDEX_FILE, *(f"{step.key}.cubin" for step in launches)])
    )
    library = KernelLibrary.open(tmp_path, sm)
    for step in launches:
        record = library.record(step)
        assert cubin_sm(library.cubin(record)) == sm
        assert (record.parameters, record.threads, record.entry) == (3, 128, "combine_kernel")


def test_the_same_bytes_again_and_nothing_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache one"))
    build_library(first, small_launches(2), 120, Progress(), workers=2)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache two"))
    build_library(second, small_launches(2), 120, Progress(), workers=1)
    assert contents(first) == contents(second)

    kept = first / f"{small_launches(1)[0].key}.cubin"
    before = kept.stat()
    build_library(first, small_launches(1), 120, Progress(), workers=1)
    assert sorted(contents(first)) == [kept.name, INDEX_FILE]
    assert kept.stat().st_mtime_ns == before.st_mtime_ns  # it was not compiled again


def test_only_cubins_that_are_as_recorded_are_kept(tmp_path: Path) -> None:
    build_library(tmp_path, small_launches(2), 120, Progress(), workers=1)
    whole = contents(tmp_path)
    damaged, missing = (tmp_path / f"{step.key}.cubin" for step in small_launches(2))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    missing.unlink()
    build_library(tmp_path, small_launches(2), 120, Progress(), workers=1)
    assert contents(tmp_path) == whole


RUN = """
import sys
from pathlib import Path
from dgcompile.plugins.build_kernels import build_library
from dgcompile.progress import Progress
from tests.plugins.test_build_kernels import small_launches
if __name__ == "__main__":
    build_library(Path(sys.argv[1]), small_launches(8), 120, Progress(), workers=1)
"""


def test_killed_and_resumed(tmp_path: Path) -> None:
    script, folder = tmp_path / "run.py", tmp_path / "kernels"
    script.write_text(RUN)
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd()), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    # A group of its own: the compiling processes die with it, as they do when a terminal closes.
    process = subprocess.Popen([sys.executable, script, folder], env=environment, start_new_session=True)
    deadline = time.monotonic() + 60
    while not list(folder.glob("*.cubin")) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    finished = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.cubin")}
    assert 1 <= len(finished) < 8
    assert not (folder / INDEX_FILE).exists()  # so nothing reads the folder as a library
    assert all(cubin_sm((folder / name).read_bytes()) == 120 for name in finished)

    build_library(folder, small_launches(8), 120, Progress(), workers=1)
    assert not (folder / JOURNAL_FILE).exists()
    library = KernelLibrary.open(folder, 120)
    assert all(library.cubin(library.record(step)) for step in small_launches(8))
    kept = [name for name, changed in finished.items() if (folder / name).stat().st_mtime_ns == changed]
    assert len(kept) >= len(finished) - 1  # the last one may have been killed before it was written down


def test_a_kernel_that_does_not_compile_is_named(tmp_path: Path) -> None:
    step = small_launches(1)[0]
    bad = Launch(step.kernel, step.arguments, step.types, {**step.constants, "BLOCK": 65}, step.grid)
    with pytest.raises(StageError, match=rf"kernel {bad.key} \(moe\.kernel\.combine_kernel.*compute capability 12\.0"):
        build_library(tmp_path, [bad], 120, Progress(), workers=1)
    assert not (tmp_path / INDEX_FILE).exists()
