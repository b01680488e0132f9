"""The bundle: the folder that ``dgcompile build`` makes and that everything else runs from.

``manifest.json`` says what lies in the folder: the model, the target, the recipe, the graphs' inputs and outputs, and
every file with its size and SHA-256. A file is trusted only if a finished stage of the build recorded it there. The
manifest holds no time and no absolute path, so that two builds of the same inputs are the same bytes.

A bundle is untrusted input: names that leave the folder, links and files that differ from their record are refused.
Nothing here imports torch, transformers or onnx.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
)

from dgcompile.config_file import parse_json, read_bytes, validation_error
from dgcompile.contract import GRAPH_FILES as GRAPH_FILES
from dgcompile.contract import GraphName, TensorSpec, graph_inputs, graph_outputs
from dgcompile.engine_table import engine_file, graph_engine_file, layers_file, table_file
from dgcompile.errors import BundleError
from dgcompile.files import PARTIAL_SUFFIX, sha256_file, write_atomically
from dgcompile.generation_config import GenerationConfig
from dgcompile.gpu import check_gpu, import_library
from dgcompile.model_spec import ModelSpec
from dgcompile.plugins.kernel_library import library_folder
from dgcompile.progress import Progress
from dgcompile.recipe import Recipe
from dgcompile.target import Backend, Target
from dgcompile.weights_store import WEIGHTS_FILE as WEIGHTS_FILE

FORMAT_VERSION = 3
"""Version of the bundle's layout that this dgcompile writes; it reads this one and older ones."""

MANIFEST_FILE = "manifest.json"
TOKENIZER_FILE = "tokenizer.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
GENERATION_CONFIG_FILE = "generation_config.json"

CALIBRATION_FILE = "calibration.json"
"""Ranges of activations, and what they were taken from; only where the recipe has static scales."""

StageName = Literal["assets", "trace", "calibration", "weights", "kernels", "engine"]
STAGES: tuple[StageName, ...] = ("assets", "trace", "calibration", "weights", "kernels", "engine")
"""The stages of a build in their order; see :func:`stages_of`."""

MAX_BATCH = 64
"""Largest ``max_batch``: the logits of 64 canvases of the published model already take 17 GB."""

REMEMBER_FROM_BYTES = 32 << 20
"""Bundles of at least this size have their hash check remembered; smaller ones are hashed on every open, in 0.04 s or
less (0.9 GB/s on a 2-core AMD EPYC)."""

_SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*")


def _check_file_name(name: str) -> str:
    if not _SAFE_NAME.fullmatch(name) or len(name) > 200:
        raise ValueError(f"unsafe file name {name!r}: a bundle's files lie inside it, in letters, digits and _ . - /")
    if name == MANIFEST_FILE or name.endswith(PARTIAL_SUFFIX):
        raise ValueError(f"file name {name!r} is reserved")
    return name


def stages_of(target: Target, recipe: Recipe) -> tuple[StageName, ...]:
    """The stages of a build, in their order: only GPU targets have kernels, only static scales are calibrated."""
    skipped = {
        *(("kernels",) if target.backend == "onnxruntime" else ()),
        *(() if recipe.needs_calibration else ("calibration",)),
    }
    return tuple(stage for stage in STAGES if stage not in skipped)


def kernels_folder(target: Target) -> str:
    """Folder in a bundle with the kernels for a GPU target."""
    return library_folder(target.sm)


FileName = Annotated[str, AfterValidator(_check_file_name)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FileRecord(_Frozen):
    """What a finished stage left in one file."""

    size: NonNegativeInt
    sha256: Sha256


class StageRecord(_Frozen):
    """One stage of the build.

    Attributes:
        state: whether the stage's files may be trusted.
        inputs: hash over everything that the stage's result depends on; a finished stage is redone when it changes.
        tools: versions of the packages that did the work.
        files: the files that the stage made.
    """

    state: Literal["pending", "finished"] = "pending"
    inputs: Sha256 | None = None
    tools: dict[str, str] = {}
    files: dict[FileName, FileRecord] = {}


class GraphRecord(_Frozen):
    """One ONNX graph: the operator sets and the file format that it needs, and its tensors in their order."""

    opsets: dict[str, PositiveInt]
    ir_version: PositiveInt
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


class EngineLibrary(_Frozen):
    """The library that runs the bundle.

    Attributes:
        name: the Python package.
        version: the one that the build tried the graphs with, or that built the engines.
        oldest_version: the oldest that can run them. ONNX Runtime keeps running old models, so a newer one is fine;
            TensorRT's engines run on the version that built them and no other.
        rehearsed: whether the engines were built without their GPU, to try the code. They are for nothing else.
    """

    name: Backend
    version: str
    oldest_version: str
    rehearsed: bool = False


class Manifest(_Frozen):
    """``manifest.json``. Fields that no finished stage has filled in yet are empty.

    Attributes:
        format_version: of the bundle's layout.
        dgcompile_version: that started the build.
        checkpoint: fingerprint of the checkpoint's content.
        max_context: most tokens, prompt and answer together, that one row may have.
        max_batch: most rows of one engine call; None where the engines take any number.
        graphs: filled in by the trace stage.
        engine: filled in by the engine stage.
        stages: every stage of :func:`stages_of`.
    """

    format_version: PositiveInt = FORMAT_VERSION
    dgcompile_version: str
    checkpoint: str
    spec: ModelSpec
    target: Target
    recipe: Recipe
    max_context: PositiveInt
    max_batch: Annotated[PositiveInt, Field(le=MAX_BATCH)] | None = None
    graphs: dict[GraphName, GraphRecord] = {}
    engine: EngineLibrary | None = None
    stages: dict[StageName, StageRecord]

    @property
    def files(self) -> dict[str, FileRecord]:
        """Every file that a finished stage recorded, in the order of the stages and then of the names."""
        return {
            name: record
            for stage in stages_of(self.target, self.recipe)
            if self.stages[stage].state == "finished"
            for name, record in sorted(self.stages[stage].files.items())
        }

    @property
    def unfinished(self) -> tuple[StageName, ...]:
        """The stages that are still to be done."""
        return tuple(stage for stage in stages_of(self.target, self.recipe) if self.stages[stage].state != "finished")

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Reads and validates ``folder/manifest.json``; the build may be unfinished.

        Raises:
            BundleError: no bundle, or a manifest that cannot be read, is malformed or comes from a newer format.
        """
        path = folder / MANIFEST_FILE
        if not folder.exists():
            raise BundleError(f"{folder}: there is no such folder", expected="a bundle made by `dgcompile build`")
        if not folder.is_dir():
            raise BundleError(f"{folder} is a file", expected="a bundle folder made by `dgcompile build`")
        if not path.exists():
            checkpoint = (folder / "config.json").exists()
            raise BundleError(
                f"{folder} has no {MANIFEST_FILE}" + (" but a config.json: it is a checkpoint" if checkpoint else ""),
                expected="a bundle folder made by `dgcompile build`",
                fix="build it first" if checkpoint else None,
            )
        rebuild = "copy the bundle again, or build it again with --overwrite"
        text = read_bytes(path, error=BundleError)
        version = parse_json(text, str(path), error=BundleError).get("format_version")
        # Before anything else: another version's fields may be others.
        if not isinstance(version, int) or isinstance(version, bool) or version < 1:
            raise BundleError(f"{path}: format_version is {version!r}", expected="a positive integer", fix=rebuild)
        if version > FORMAT_VERSION:
            raise BundleError(
                f"{path}: format_version is {version}, newer than this dgcompile reads",
                expected=f"{FORMAT_VERSION} or older",
                fix="update dgcompile, or build the bundle again with this version",
            )
        try:
            manifest = cls.model_validate_json(text)
        except ValidationError as problem:
            raise validation_error(str(path), problem, cls, error=BundleError) from problem
        manifest._check(path)
        return manifest

    def _check(self, path: Path) -> None:
        """Refuses a manifest whose parts contradict each other: sessions size their buffers by it."""
        rebuild = "copy the bundle again, or build it again with --overwrite"
        if self.recipe.activation_dtype is None:
            raise BundleError(f"{path}: recipe.activation_dtype is missing", fix=rebuild)
        wanted = stages_of(self.target, self.recipe)
        missing = [stage for stage in wanted if stage not in self.stages]
        if missing:
            raise BundleError(f"{path}: stages.{missing[0]} is missing", fix=rebuild)
        foreign = [stage for stage in self.stages if stage not in wanted]
        if foreign:
            raise BundleError(f"{path}: target {self.target.name} has no stage {foreign[0]}", fix=rebuild)
        if (self.max_batch is None) != (self.target.backend == "onnxruntime"):
            raise BundleError(f"{path}: max_batch is {self.max_batch} for target {self.target.name}", fix=rebuild)
        if self.engine is not None and self.engine.name != self.target.backend:
            raise BundleError(f"{path}: engine.name is {self.engine.name}", expected=self.target.backend, fix=rebuild)
        for graph, record in self.graphs.items():
            expected_inputs = graph_inputs(graph, self.spec, self.recipe.computes_in)
            expected_outputs = graph_outputs(graph, self.spec, self.recipe.computes_in)
            if list(record.inputs) != expected_inputs or list(record.outputs) != expected_outputs:
                raise BundleError(f"{path}: graphs.{graph} does not fit the model in spec", fix=rebuild)
        if not self.spec.canvas_length < self.max_context <= self.spec.max_position_embeddings:
            raise BundleError(
                f"{path}: max_context is {self.max_context}",
                expected=f"{self.spec.canvas_length + 1} to {self.spec.max_position_embeddings}",
                fix=rebuild,
            )
        seen: dict[str, StageName] = {}
        for stage, stage_record in self.stages.items():
            for name in stage_record.files:
                if name in seen:
                    raise BundleError(f"{path}: {name} is listed by the stages {seen[name]} and {stage}", fix=rebuild)
                seen[name] = stage

    def to_bytes(self) -> bytes:
        """The manifest as it lies on disk: the same bytes for the same content."""
        content = self.model_dump(mode="json")
        return (json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()

    def write(self, folder: Path) -> None:
        """Replaces ``folder/manifest.json`` at once; raises OSError as the file system reports it."""
        write_atomically(folder / MANIFEST_FILE, self.to_bytes())


@dataclass(frozen=True)
class Bundle:
    """A finished, checked bundle.

    Attributes:
        path: its folder.
        manifest: what it holds.
        generation: the checkpoint's generation defaults.
    """

    path: Path
    manifest: Manifest
    generation: GenerationConfig

    @classmethod
    def open(cls, path: str | Path, *, to_run: bool = True, progress: Progress | None = None) -> Bundle:
        """Opens a bundle after checking every file of it.

        Args:
            path: the bundle's folder.
            to_run: also check that this machine can run it; False is for looking at a bundle made for another machine.
            progress: told how far hashing got, which takes a while the first time a large bundle is opened.

        Raises:
            BundleError: it is missing, unfinished, damaged, malformed, or made for another machine or library.
        """
        folder = Path(path)
        manifest = Manifest.read(folder)
        if manifest.unfinished:
            raise BundleError(
                f"{folder}: the build is unfinished (stage {manifest.unfinished[0]} is to be done)",
                fix=_how_to_finish(manifest, folder),
            )
        absent = [name for name in required_files(manifest.target, manifest.recipe) if name not in manifest.files]
        if absent or manifest.engine is None or set(manifest.graphs) != set(GRAPH_FILES):
            lacking = absent[0] if absent else "engine" if manifest.engine is None else "a graph"
            raise BundleError(
                f"{folder / MANIFEST_FILE}: all stages are finished but {lacking} is not recorded",
                fix="build the bundle again with --overwrite",
            )
        if to_run:
            check_machine(manifest, folder)
        check_files(folder, manifest.files, progress=progress)
        generation = GenerationConfig.from_file(folder / GENERATION_CONFIG_FILE, error=BundleError)
        return cls(path=folder, manifest=manifest, generation=generation)

    @property
    def spec(self) -> ModelSpec:
        """Shape of the model."""
        return self.manifest.spec

    @property
    def target(self) -> Target:
        """What the bundle was built for."""
        return self.manifest.target

    @property
    def recipe(self) -> Recipe:
        """Precision of each class of weight."""
        return self.manifest.recipe

    @property
    def max_context(self) -> int:
        """Most tokens, prompt and answer together, that one row may have."""
        return self.manifest.max_context

    @property
    def max_batch(self) -> int | None:
        """Most rows of one engine call; None where the engines take any number."""
        return self.manifest.max_batch

    def graph_file(self, graph: GraphName) -> Path:
        """One of the two ONNX graphs."""
        return self.path / GRAPH_FILES[graph]

    @property
    def weights_file(self) -> Path:
        """All weights; both graphs point into it."""
        return self.path / WEIGHTS_FILE

    @property
    def tokenizer_file(self) -> Path | None:
        """tokenizer.json, if the checkpoint had one."""
        return self._optional(TOKENIZER_FILE)

    @property
    def chat_template_file(self) -> Path | None:
        """The chat template, if the checkpoint had one."""
        return self._optional(CHAT_TEMPLATE_FILE)

    def _optional(self, name: str) -> Path | None:
        return self.path / name if name in self.manifest.files else None

    def verify_files(self, *, full: bool = True, progress: Progress | None = None) -> None:
        """Compares every file with its record; see :func:`check_files`."""
        check_files(self.path, self.manifest.files, full=full, progress=progress)


def check_machine(manifest: Manifest, folder: Path) -> None:
    """Refuses a bundle that this machine or this version of its engine library cannot run.

    Raises:
        BundleError: built for another target, or the library is missing or older than the graphs need.
    """
    target, engine = manifest.target, manifest.engine
    if engine is None:
        raise BundleError(f"{folder} has no engine", fix=_how_to_finish(manifest, folder))
    if target.backend != "onnxruntime":
        _check_gpu_machine(target, engine, folder)
        return
    try:
        import onnxruntime  # slow to import, and not needed to look at a bundle
    except ImportError as error:
        raise BundleError(
            f"{folder} runs on {engine.name}, which cannot be imported here ({error})",
            fix=f"pip install 'onnxruntime>={engine.oldest_version}'",
        ) from error
    if version_key(onnxruntime.__version__) < version_key(engine.oldest_version):
        opset = max(record.opsets.get("", 0) for record in manifest.graphs.values())
        raise BundleError(
            f"{folder}: its graphs use ONNX opset {opset} and this machine has onnxruntime {onnxruntime.__version__}",
            expected=f"onnxruntime {engine.oldest_version} or newer (built with {engine.version})",
            fix=f"pip install 'onnxruntime>={engine.oldest_version}'",
        )


def _check_gpu_machine(target: Target, engine: EngineLibrary, folder: Path) -> None:
    if engine.rehearsed:
        raise BundleError(
            f"{folder} holds the engines of a rehearsal, which no GPU runs",
            fix=f"finish it on a machine with {target.title}: dgcompile build --resume {folder}",
        )
    assert target.compute_capability is not None  # every GPU target has one
    try:
        check_gpu(target.compute_capability, target.backend)
        import_library(target.backend, engine.version)
    except BundleError as error:
        raise BundleError(
            f"{folder} was built for {target.title}: {error.problem}", expected=error.expected, fix=error.fix
        ) from error


def required_files(target: Target, recipe: Recipe) -> tuple[str, ...]:
    """Files without which a finished bundle is none."""
    if target.backend == "onnxruntime":
        engines = tuple(graph_engine_file(graph) for graph in GRAPH_FILES)
    else:
        parts = (engine_file, table_file, layers_file)
        engines = (f"{kernels_folder(target)}/index.json", *(part(graph) for graph in GRAPH_FILES for part in parts))
    ranges = (CALIBRATION_FILE,) if recipe.needs_calibration else ()
    return (*GRAPH_FILES.values(), WEIGHTS_FILE, GENERATION_CONFIG_FILE, *ranges, *engines)


def _how_to_finish(manifest: Manifest, folder: Path) -> str:
    if manifest.unfinished == ("engine",) and manifest.target.backend != "onnxruntime":
        return f"on a machine that can build it: dgcompile build --resume {folder}"
    return "run the same `dgcompile build` command again: it goes on where it stopped"


def version_key(version: str) -> tuple[int, ...]:
    """Orders versions by their leading numbers: "1.23.2+cpu" -> (1, 23, 2)."""
    numbers = re.match(r"\d{1,9}(\.\d{1,9})*", version)  # a manifest's may have more digits than int() reads
    return tuple(int(part) for part in numbers.group().split(".")) if numbers else ()


def check_files(
    folder: Path, files: Mapping[str, FileRecord], *, full: bool = False, progress: Progress | None = None
) -> None:
    """Compares files of a bundle with their records.

    Hashes of a large bundle are remembered in the user's cache folder by each file's size, times and inode: the second
    open is instant. What disks do to bytes behind the file system's back is seen with ``full`` only.

    Args:
        folder: the bundle.
        files: records by name.
        full: hash every file, whatever is remembered.
        progress: told how far hashing got.

    Raises:
        BundleError: a file is missing, is a link, lies outside the folder, or differs in size or content.
    """
    broken = "copy the bundle again, or repair it by the `dgcompile build` command that made it"
    stats: dict[str, os.stat_result] = {}
    for name, record in files.items():
        path = folder / name
        try:
            found = path.lstat()
        except OSError as error:
            raise BundleError(
                f"{path} is missing ({error.strerror or error})",
                expected="every file that the manifest lists",
                fix=broken,
            ) from error
        if not stat.S_ISREG(found.st_mode) or not path.resolve().is_relative_to(folder.resolve()):
            raise BundleError(f"{path} is not a regular file of the bundle", expected="a file, not a link", fix=broken)
        if found.st_size != record.size:
            raise BundleError(f"{path} has {found.st_size} bytes", expected=f"{record.size} bytes", fix=broken)
        stats[name] = found
    remembered = {} if full else _recall(folder)
    to_hash = [name for name in files if remembered.get(name) != [*_identity(stats[name]), files[name].sha256]]
    if not to_hash:
        return
    with (progress or Progress()).task("check files", sum(files[name].size for name in to_hash), "bytes") as advance:
        for name in to_hash:
            try:
                digest = sha256_file(folder / name, advance)
            except OSError as error:
                raise BundleError(f"{folder / name} cannot be read ({error.strerror or error})", fix=broken) from error
            if digest != files[name].sha256:
                raise BundleError(
                    f"{folder / name} is damaged: its SHA-256 is {digest[:12]}...",
                    expected=f"{files[name].sha256[:12]}... as the manifest records",
                    fix=broken,
                )
    _remember(folder, files, stats)


def record_files(
    folder: Path, names: Iterable[str], *, label: str, progress: Progress, known: Mapping[str, str] | None = None
) -> dict[str, FileRecord]:
    """Records of files just written, for the manifest.

    Args:
        folder: the bundle.
        names: the files.
        label: what ``progress`` shows while they are hashed.
        progress: told the bytes.
        known: SHA-256 of files that were hashed while they were written: these are not read again.
    """
    known = known or {}
    stats = {name: (folder / name).lstat() for name in names}
    records = {}
    with progress.task(label, sum(found.st_size for found in stats.values()), "bytes") as advance:
        for name, found in stats.items():
            digest = known.get(name)
            if digest is None:
                digest = sha256_file(folder / name, advance)
            else:
                advance(found.st_size)
            records[name] = FileRecord(size=found.st_size, sha256=digest)
    _remember(folder, records, stats)
    return records


def _identity(found: os.stat_result) -> list[int]:
    # The change time cannot be set back by the owner, the modification time can.
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev]


def _memory_file(folder: Path) -> Path | None:
    """Where a hash check is remembered: outside the bundle, which may be read-only and must not vouch for itself."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # no home folder
        return None
    key = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:32]
    return cache / "dgcompile" / "verified" / f"{key}.json"


def _recall(folder: Path) -> dict[str, list[int | str]]:
    path = _memory_file(folder)
    try:
        content = json.loads(path.read_text()) if path else {}
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _remember(folder: Path, files: Mapping[str, FileRecord], stats: Mapping[str, os.stat_result]) -> None:
    """Notes that these files were found equal to their records while they looked like ``stats``."""
    path = _memory_file(folder)
    if path is None or sum(record.size for record in files.values()) < REMEMBER_FROM_BYTES:
        return
    verified = {name: [*_identity(stats[name]), record.sha256] for name, record in files.items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps({**_recall(folder), **verified}, sort_keys=True).encode())
    except OSError:
        pass  # a cache folder that cannot be written only costs the next open its time
