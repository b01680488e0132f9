"""What a stage of a build is: what it depends on, what it makes, and the hash that says whether it must be redone."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dgcompile import __version__
from dgcompile.bundle import EngineLibrary, GraphRecord, Manifest, StageName
from dgcompile.checkpoint import Checkpoint
from dgcompile.contract import GraphName
from dgcompile.errors import StageError
from dgcompile.progress import Progress
from dgcompile.source_hash import source_hash


@dataclass(frozen=True)
class Job:
    """What one build is given.

    Attributes:
        folder: the bundle's folder.
        progress: told what is going on.
        source: the checkpoint; None for a build that goes on with what an earlier one finished.
        calibration: prompts to calibrate with, where the recipe needs them.
    """

    folder: Path
    progress: Progress
    source: Checkpoint | None = None
    calibration: Path | None = None

    @property
    def checkpoint(self) -> Checkpoint:
        """The source.

        Raises:
            StageError: this build goes on without one.
        """
        if self.source is None:
            raise StageError(
                "this stage needs the checkpoint",
                fix="run `dgcompile build CHECKPOINT ...` again where the checkpoint is",
            )
        return self.source


@dataclass(frozen=True)
class Made:
    """What a stage made: names of its files, and the parts of the manifest that it fills in.

    ``known_hashes`` are SHA-256 of files that were hashed while they were written.
    """

    files: tuple[str, ...] = ()
    known_hashes: Mapping[str, str] = field(default_factory=dict)
    graphs: dict[GraphName, GraphRecord] | None = None
    engine: EngineLibrary | None = None


@dataclass(frozen=True)
class Stage:
    """One stage.

    Attributes:
        name: in the manifest.
        tools: packages whose versions its result depends on; one that is not installed has the version "".
        code: modules and packages of dgcompile whose source its result depends on.
        inputs: everything else that it depends on, as JSON data.
        run: does the work.
        lacks: what this machine lacks to do it; None for a stage that every machine can do. Where something is lacking,
            a finished stage stays finished, whatever versions the tools have here.
    """

    name: StageName
    tools: tuple[str, ...]
    code: tuple[str, ...]
    inputs: Callable[[Job, Manifest], dict[str, Any]]
    run: Callable[[Job, Manifest], Made]
    lacks: Callable[[Manifest], str | None] | None = None

    def tool_versions(self) -> dict[str, str]:
        """Versions of the tools, and of Python."""
        return {"python": platform.python_version(), **{tool: _version(tool) for tool in self.tools}}

    def input_hash(self, job: Job, manifest: Manifest, tools: Mapping[str, str] | None = None) -> str:
        """SHA-256 over everything that the result depends on; ``tools`` are this machine's unless given."""
        content = {
            "dgcompile": __version__,
            "code": {name: source_hash(name) for name in self.code},
            "tools": self.tool_versions() if tools is None else dict(tools),
            "inputs": self.inputs(job, manifest),
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
