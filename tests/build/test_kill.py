"""kill -9, Ctrl-C, full disks: nothing half-written is trusted, and the same command finishes with the same bytes."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dgcompile.build import build
from dgcompile.build.lock import LOCK_FILE
from dgcompile.bundle import MANIFEST_FILE, WEIGHTS_FILE, Bundle, Manifest, StageName
from dgcompile.errors import BundleError, StageError
from dgcompile.progress import Advance, Progress
from dgcompile.recipe import Recipe
from dgcompile.target import Target
from tests.build.helpers import content, cpu_build, start_runner, unfinished_copy

KILLS = [
    # Where, and which stages are finished then.
    ("rename", MANIFEST_FILE, None),
    ("assets", "0", 0),
    ("assets", "2", 0),
    ("record assets", "end", 0),
    ("trace", "0", 1),
    ("trace", "3", 1),
    ("record trace", "end", 1),
    ("weights", "0", 2),
    ("weights", "20", 2),
    ("rename", WEIGHTS_FILE, 2),
    ("record weights", "end", 2),
    ("rename", MANIFEST_FILE, 2),
    ("engine", "0", 3),
    ("engine", "3", 3),
    ("record engine", "end", 3),
]


def test_killed_again_and_again_in_every_stage_gives_the_same_bytes(
    checkpoint: Path, bundle: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "bundle"
    for label, count, finished in KILLS:
        process = start_runner(checkpoint, folder, "--at", label, count, "kill")
        _, errors = process.communicate(timeout=200)
        assert process.returncode == -signal.SIGKILL, f"{label} {count} was not reached: {errors}"
        with pytest.raises(BundleError):
            Bundle.open(folder)
        if finished is None:
            assert not (folder / MANIFEST_FILE).exists()
        else:
            assert 4 - len(Manifest.read(folder).unfinished) == finished, (label, count)
    assert cpu_build(checkpoint, folder) == ["engine"]
    assert content(folder) == content(bundle)


@pytest.mark.parametrize("label", ["assets", "weights", "engine"])
def test_ctrl_c_passes_through_and_the_build_goes_on_later(
    checkpoint: Path, bundle: Path, tmp_path: Path, label: str
) -> None:
    folder = unfinished_copy(bundle, tmp_path / "bundle", "assets", "weights", "engine")

    class Interrupting(Progress):
        @contextmanager
        def task(self, started: str, total: float | None = None, unit: str = "") -> Iterator[Advance]:
            def advance(amount: float = 1.0, /) -> None:
                if started == label:
                    signal.raise_signal(signal.SIGINT)

            yield advance

    with pytest.raises(KeyboardInterrupt):
        build(checkpoint, Target.load("cpu"), Recipe.load("fp32"), folder, progress=Interrupting())
    assert not (folder / LOCK_FILE).exists()
    assert label in Manifest.read(folder).unfinished
    assert label in cpu_build(checkpoint, folder)
    assert content(folder) == content(bundle)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "dgcompile-test", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True)
    except OSError as error:
        pytest.skip(f"cannot try a full disk: {error}")
    if done.returncode:
        pytest.skip(f"cannot try a full disk, mounting is refused here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("stage", ["assets", "weights", "engine"])
def test_a_full_disk_is_said_clearly_and_nothing_half_written_is_trusted(
    checkpoint: Path, bundle: Path, small_disk: Path, stage: StageName
) -> None:
    folder = unfinished_copy(bundle, small_disk / "bundle", stage)
    with (small_disk / "filler").open("wb", buffering=0) as filler, pytest.raises(OSError, match="No space left"):
        while True:
            filler.write(bytes(4096))
    with pytest.raises(StageError) as caught:
        cpu_build(checkpoint, folder)
    text = str(caught.value)
    assert "no space left" in text.lower() or "no room" in text
    assert str(folder) in text and "run the same command again" in text
    assert "\n" not in text
    assert stage in Manifest.read(folder).unfinished
    with pytest.raises(BundleError, match="unfinished"):
        Bundle.open(folder)

    (small_disk / "filler").unlink()
    assert cpu_build(checkpoint, folder) == [stage]
    assert content(folder) == content(bundle)


def test_a_file_size_limit_is_like_a_full_disk(checkpoint: Path, bundle: Path, tmp_path: Path) -> None:
    folder = unfinished_copy(bundle, tmp_path / "bundle", "weights")
    limit = (bundle / WEIGHTS_FILE).stat().st_size // 2
    process = start_runner(checkpoint, folder, "--file-size-limit", str(limit))
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 1
    assert WEIGHTS_FILE in errors and "File too large" in errors
    assert "Traceback" not in errors
    assert "weights" in Manifest.read(folder).unfinished
    assert cpu_build(checkpoint, folder) == ["weights"]
    assert content(folder) == content(bundle)


def test_two_builds_in_one_folder_do_not_meet(checkpoint: Path, bundle: Path, tmp_path: Path) -> None:
    folder = unfinished_copy(bundle, tmp_path / "bundle", "engine")
    process = start_runner(checkpoint, folder, "--at", "engine", "1", "pause")
    assert process.stdout is not None
    assert process.stdout.readline() == "paused\n"
    before = content(folder)
    with pytest.raises(BundleError, match="another build is running in this folder"):
        cpu_build(checkpoint, folder)
    assert content(folder) == before
    _, errors = process.communicate("", timeout=100)
    assert process.returncode == 0, errors
    assert content(folder) == content(bundle)


def test_the_lock_of_a_killed_build_locks_nobody_out(checkpoint: Path, bundle: Path, tmp_path: Path) -> None:
    folder = unfinished_copy(bundle, tmp_path / "bundle", "engine")
    process = start_runner(checkpoint, folder, "--at", "engine", "1", "pause")
    assert process.stdout is not None
    process.stdout.readline()
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert (folder / LOCK_FILE).exists()
    assert cpu_build(checkpoint, folder) == ["engine"]
    assert content(folder) == content(bundle)
