"""Builds both engines of a bundle: starts a worker for each, follows it, and gives its files their names."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

# The worker imports it; by importing it here, it is compiled when the worker starts, the first time too.
import dgcompile.plugins.adapter  # noqa: F401
from dgcompile.build.tensorrt.graph import engine_graph, engine_table
from dgcompile.build.tensorrt.libraries import worker_environment
from dgcompile.build.tensorrt.worker import BUNDLE_LINK, EngineJob
from dgcompile.contract import GRAPH_FILES
from dgcompile.engine_table import ENGINES_FOLDER, engine_file, layers_file, table_file
from dgcompile.errors import EngineError
from dgcompile.files import PARTIAL_SUFFIX, sync_folder, write_atomically
from dgcompile.model_spec import ModelSpec
from dgcompile.progress import Progress
from dgcompile.recipe import ActivationDType
from dgcompile.target import Target
from dgcompile.worker_process import Ended, run_worker

ENGINE_FILES: tuple[str, ...] = tuple(
    name(graph) for graph in GRAPH_FILES for name in (engine_file, table_file, layers_file)
)
"""Names of the files that :func:`build_engines` makes."""

_LAST_LINES = 12


def build_engines(
    folder: Path,
    spec: ModelSpec,
    dtype: ActivationDType,
    target: Target,
    kernels: str,
    max_context: int,
    max_batch: int,
    progress: Progress,
) -> str:
    """Builds ``engines/{encoder,denoiser}`` of the bundle in ``folder``, each in a process of its own.

    Args:
        folder: holds the graphs, the weights and the kernels.
        spec: the model.
        dtype: of activations and KV cache.
        target: the GPU; its backend names the library.
        kernels: folder in the bundle with the kernels for that GPU.
        max_context: tokens of a row.
        max_batch: most rows of a call.
        progress: told of the builder's progress, in percent.

    Returns:
        Version of the library that built them.

    Raises:
        EngineError: a graph cannot be built; says what the builder said.
    """
    (folder / ENGINES_FOLDER).mkdir(exist_ok=True)
    version = ""
    for graph, file in GRAPH_FILES.items():
        _, lifted = engine_graph(folder / file)
        table = engine_table(graph, spec, dtype, max_context, max_batch, lifted)
        job = EngineJob(
            backend=target.backend,
            graph=graph,
            table=table.model_dump_json(),
            kernels=kernels,
            sm=target.sm,
            multiprocessors=target.multiprocessors or 1,
            engine=engine_file(graph) + PARTIAL_SUFFIX,
            layers=layers_file(graph) + PARTIAL_SUFFIX,
            parent=f"{os.getpid():010}",  # as long for every process; see worker.py
        )
        try:
            told = _run_worker(job, folder, progress)
            version = told["version"]
            for name in (job.engine, job.layers):
                (folder / name).replace(folder / name.removesuffix(PARTIAL_SUFFIX))
        finally:
            for name in (job.engine, job.layers):
                (folder / name).unlink(missing_ok=True)
        table = table.model_copy(update={"workspace_bytes": told["workspace_bytes"]})
        write_atomically(folder / table_file(graph), table.to_bytes())
    sync_folder(folder / ENGINES_FOLDER)
    return version


def _run_worker(job: EngineJob, folder: Path, progress: Progress) -> Mapping[str, Any]:
    """Starts a worker with a link to the bundle and follows its events to the last one; returns that."""
    with (
        tempfile.TemporaryDirectory(prefix="dgcompile-") as place,
        progress.task(f"engine {job.graph}", 100, "%") as advance,
    ):
        # Under a name that is as long wherever the bundle lies; see worker.py.
        (Path(place) / BUNDLE_LINK).symlink_to(folder.resolve())
        phases = _Phases()
        ended = run_worker(
            _worker_command(),
            asdict(job),
            lambda event: advance(phases.take(event)),
            folder=Path(place),
            environment=worker_environment(job.backend, Path(place)),
        )
        # Before the task ends, which says that it is done.
        return _judge(job, ended, folder)


def _judge(job: EngineJob, ended: Ended, folder: Path) -> Mapping[str, Any]:
    """The last event of a worker that built its engine; an exception for one that did not."""
    last = ended.last
    if ended.done:
        return last
    if last.get("event") == "os error":
        raise OSError(last["errno"], last["text"], str(folder / job.engine))
    if last.get("event") == "error":
        raise EngineError(last["problem"], expected=last["expected"], fix=last["fix"])
    raise EngineError(f"the process that built the {job.graph} {ended.words}")


def _worker_command() -> list[str]:
    return [sys.executable, "-m", "dgcompile.build.tensorrt.worker"]


class _Phases:
    """The builder's nested phases as one percentage.

    A phase's share of its parent is one of the parent's steps, so the sum never exceeds the whole; phases that come
    again with a finished parent add nothing.
    """

    def __init__(self) -> None:
        self._open: dict[str, tuple[str | None, int, int]] = {}  # parent, steps, steps done
        self._told = 0.0

    def take(self, event: Mapping[str, Any]) -> float:
        """Takes an event; returns by how many percent the whole got further."""
        kind, name = event["event"], event.get("name", "")
        if kind == "phase":
            self._open[name] = (event["parent"], max(event["steps"], 1), 0)
        elif kind == "step" and name in self._open:
            parent, steps, done = self._open[name]
            self._open[name] = (parent, steps, min(done + 1, steps))
        elif kind == "finish":
            self._open.pop(name, None)
        elif kind == "done":
            return 100 - self._told
        now = max((self._share(name) for name in self._open), default=0.0) * 100
        further = max(0.0, now - self._told)
        self._told += further
        return further

    def _share(self, name: str) -> float:
        """How much of the whole is done when this phase is where the builder is."""
        part, at, seen = 0.0, name, set()
        while at in self._open and at not in seen:
            seen.add(at)
            parent, steps, done = self._open[at]
            part = min((done + part) / steps, 1.0)
            if parent is None:
                return part
            at = parent
        return 0.0
