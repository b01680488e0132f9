"""What the tests of the build share."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dgcompile.build import build
from dgcompile.bundle import MANIFEST_FILE, Bundle, StageName
from dgcompile.progress import Advance, Progress
from dgcompile.recipe import Recipe
from dgcompile.target import Target


class Labels(Progress):
    """Remembers which tasks were done."""

    def __init__(self) -> None:
        self.labels: list[str] = []

    @contextmanager
    def task(self, label: str, total: float | None = None, unit: str = "") -> Iterator[Advance]:
        self.labels.append(label)
        with super().task(label, total, unit) as advance:
            yield advance

    @property
    def stages(self) -> list[str]:
        """The stages that ran."""
        return [label.removeprefix("record ") for label in self.labels if label.startswith("record ")]


def cpu_build(checkpoint: Path, output: Path, *, overwrite: bool = False, max_context: int | None = None) -> list[str]:
    """Builds, or goes on building; returns the stages that ran."""
    progress = Labels()
    bundle = build(
        checkpoint,
        Target.load("cpu"),
        Recipe.load("fp32"),
        output,
        overwrite=overwrite,
        max_context=max_context,
        progress=progress,
    )
    assert isinstance(bundle, Bundle)
    return progress.stages


def start_runner(checkpoint: Path, output: Path, *options: str) -> subprocess.Popen[str]:
    """Starts :mod:`tests.build.runner`."""
    command = [sys.executable, "-m", "tests.build.runner", str(checkpoint), str(output), *options]
    root = Path(__file__).parents[2]
    return subprocess.Popen(
        command, cwd=root, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def content(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of a folder, hidden ones too, by relative name: two that differ say which files do."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def unfinished_copy(bundle: Path, folder: Path, *stages: StageName) -> Path:
    """A copy of a bundle as a build leaves it that was killed when these stages were to be done."""
    shutil.copytree(bundle, folder)
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    for stage in stages:
        for name in manifest["stages"][stage]["files"]:
            (folder / name).unlink()
        manifest["stages"][stage] = {"state": "pending"}
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest))
    return folder


def readers(layers: str, name: str) -> list[tuple[str, str]]:
    """The layers of an engine that read an input: the type of each, and the dtype that it reads.

    Args:
        layers: the list of layers as TensorRT-RTX writes it.
        name: of the input.
    """
    found = []
    for line in layers.splitlines():
        parts = re.match(r"Name: \S+, LayerType: (\w+), Inputs: \[(.*?)\], Constants:", line)
        if parts:
            inputs = re.findall(rf"Name: {re.escape(name)}, [^{{}}]*?Datatype: (\w+)", parts[2])
            found += [(parts[1], dtype) for dtype in inputs]
    return found
