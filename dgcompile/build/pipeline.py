"""``build``: runs the stages that are not done yet, and records each in the manifest when it is."""

from __future__ import annotations

import errno
import importlib.util
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dgcompile import __version__
from dgcompile.build.kernels import plan_kernels
from dgcompile.build.limits import resolve_max_batch, resolve_max_context
from dgcompile.build.lock import LOCK_FILE, folder_lock
from dgcompile.build.planning import plan_in_folder, settled_recipe
from dgcompile.build.stage import Job, Stage
from dgcompile.build.stages import STAGES_OF
from dgcompile.bundle import (
    CALIBRATION_FILE,
    CHAT_TEMPLATE_FILE,
    GENERATION_CONFIG_FILE,
    GRAPH_FILES,
    MANIFEST_FILE,
    TOKENIZER_FILE,
    WEIGHTS_FILE,
    Bundle,
    Manifest,
    StageName,
    StageRecord,
    check_files,
    record_files,
    stages_of,
)
from dgcompile.checkpoint import Checkpoint
from dgcompile.errors import (
    BundleError,
    DgcompileError,
    EngineElsewhereError,
    InputError,
    MissingDependencyError,
    StageError,
)
from dgcompile.files import PARTIAL_SUFFIX
from dgcompile.plan import Workload
from dgcompile.plan.refusal import refuse_what_cannot_fit
from dgcompile.progress import Progress
from dgcompile.recipe import Recipe
from dgcompile.target import Target
from dgcompile.weights_store import JOURNAL_FILE, with_static_scale

_BUNDLE_FILES = frozenset(
    {
        MANIFEST_FILE,
        WEIGHTS_FILE,
        CALIBRATION_FILE,
        TOKENIZER_FILE,
        CHAT_TEMPLATE_FILE,
        GENERATION_CONFIG_FILE,
        *GRAPH_FILES.values(),
    }
)
_BUNDLE_FOLDERS = ("kernels", "engines", "cache")
"""Folders of bundles for GPUs; the last holds what engines remember between runs, which no manifest lists."""

_IN_FOLDERS = re.compile(
    rf"(kernels/sm\d+/[\w.-]+\.(cubin|json)|engines/\w+\.(engine|tensors\.json|layers\.txt)|cache/[\w.-]+)({re.escape(PARTIAL_SUFFIX)})?"
)
"""The files in them that a build may remove."""
_LEFTOVERS = frozenset({JOURNAL_FILE, *(name + PARTIAL_SUFFIX for name in (*_BUNDLE_FILES, JOURNAL_FILE))})
"""What a killed build may leave behind: these names and no others are ever removed."""

_BUILD_PACKAGES = ("torch", "transformers", "onnx", "onnxscript")
_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_RESUME = "run the same command again: it goes on where it stopped"


def build(
    checkpoint: Checkpoint | str | Path,
    target: Target,
    recipe: Recipe,
    output: str | Path,
    *,
    max_context: int | None = None,
    max_batch: int | None = None,
    calibration: Path | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Bundle:
    """Makes a bundle, or finishes one that a killed build left behind; a finished one is only checked.

    Ctrl-C (KeyboardInterrupt) may end it at any point: the same call goes on where it stopped.

    Args:
        checkpoint: an opened checkpoint, a folder, or a hub id.
        target: what to build for.
        recipe: the precision of each class of weight.
        output: the bundle's folder, made when missing.
        max_context: most tokens, prompt and answer together, of one row; see :func:`resolve_max_context`.
        max_batch: most rows of one engine call; GPU engines are built for it (default 1), CPU graphs take any number.
        calibration: prompts for recipes with static scales of activations, a JSON object with "prompt" a line; None for
            the checkpoint's own ``calibration.jsonl``.
        overwrite: replace a bundle in ``output`` that was built from other inputs. Other folders are never touched.
        progress: told what is going on.

    Raises:
        TargetError, RecipeError, CheckpointError: what to build from or for is refused, before any work.
        BundleError: the output folder cannot be used.
        InputError: ``max_context`` or ``max_batch`` is out of range or more than the target has memory for, or there
            are no prompts to calibrate with.
        StageError: this machine's memory or disk is too small, or a stage failed; what was finished before stays so.
        EngineElsewhereError: all is done but the engines, which need another machine.
        MissingDependencyError: the packages of ``dgcompile[build]`` are not installed.
    """
    check_buildable(target, recipe)
    progress = progress or Progress()
    opened = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint.open(checkpoint)
    recipe = settled_recipe(opened, target, recipe)
    recipe.check_model(opened.spec)
    if opened.quantized:
        from dgcompile.quantize.requantize import refuse_second_rounding

        refuse_second_rounding(opened, recipe)
    if target.backend != "onnxruntime":
        plan_kernels(opened.spec, recipe, target)
    context, batch = resolve_max_context(opened.spec, max_context), resolve_max_batch(target, max_batch)
    prompts = _calibration_prompts(opened, recipe, calibration)
    folder = Path(output)
    workload = Workload(opened.spec, recipe, target, context, batch or 1)
    refuse_what_cannot_fit(plan_in_folder(workload, folder, opened.path, calibrates=prompts is not None))
    _prepare_folder(folder)
    with _explained("starting the build", folder), folder_lock(folder):
        wanted = Manifest(
            dgcompile_version=__version__,
            checkpoint=opened.fingerprint(progress),
            spec=opened.spec,
            target=target,
            recipe=recipe,
            max_context=context,
            max_batch=batch,
            stages={stage: StageRecord() for stage in stages_of(target, recipe)},
        )
        manifest = _take_over(folder, wanted, overwrite)
        job = Job(folder, progress, opened, prompts)
        for stage in STAGES_OF[target.backend]:
            if stage.name not in manifest.stages:
                continue
            with _explained(f"stage {stage.name}", folder):
                manifest = _bring_up_to_date(stage, job, manifest)
        _sweep(folder, manifest)
    # A bundle for a GPU may well be built where it cannot run.
    return Bundle.open(folder, to_run=target.backend == "onnxruntime", progress=progress)


def resume(folder: str | Path, *, progress: Progress | None = None) -> Bundle:
    """Builds the engines of a bundle whose other stages are finished: needs no checkpoint and no PyTorch.

    Args:
        folder: the bundle.
        progress: told what is going on.

    Raises:
        BundleError: it is no bundle, is damaged, or lacks an earlier stage.
        EngineElsewhereError: this machine cannot build them either.
        StageError: a stage failed.
    """
    folder = Path(folder)
    progress = progress or Progress()
    _refuse_links(folder)
    Manifest.read(folder)  # before the lock is made in somebody else's folder
    with _explained("starting the build", folder), folder_lock(folder):
        manifest = Manifest.read(folder)
        earlier = [stage for stage in manifest.unfinished if stage != "engine"]
        if earlier:
            raise BundleError(
                f"{folder}: stage {earlier[0]} is to be done, which needs the checkpoint",
                fix="run `dgcompile build CHECKPOINT ...` again where the checkpoint is",
            )
        stages = {name: record for name, record in manifest.stages.items() if name != "engine"}
        check_files(folder, {n: f for record in stages.values() for n, f in record.files.items()}, progress=progress)
        engine = STAGES_OF[manifest.target.backend][-1]
        with _explained(f"stage {engine.name}", folder):
            manifest = _bring_up_to_date(engine, Job(folder, progress), manifest)
        _sweep(folder, manifest)
    return Bundle.open(folder, to_run=manifest.target.backend == "onnxruntime", progress=progress)


def check_buildable(target: Target, recipe: Recipe) -> None:
    """Refuses what this installation cannot build, before any work.

    Raises:
        RecipeError: the target cannot run the recipe.
        MissingDependencyError: a package that building needs is not installed.
    """
    recipe.check(target)
    packages = _BUILD_PACKAGES if target.backend == "onnxruntime" else (*_BUILD_PACKAGES, "triton")
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingDependencyError(
            f"building needs {', '.join(missing)}, which is not installed", fix="pip install 'dgcompile[build]'"
        )


def _calibration_prompts(checkpoint: Checkpoint, recipe: Recipe, given: Path | None) -> Path | None:
    """The file to calibrate with; None where the recipe needs no ranges, or a published checkpoint has them.

    Raises:
        InputError: there is none, or one was given for nothing.
    """
    if not recipe.needs_calibration:
        if given is not None:
            raise InputError(
                f"prompts to calibrate with were given for recipe {recipe.name!r}, which has no static scales",
                fix="leave out --calibration",
            )
        return None
    from dgcompile.quantize.calibration import CALIBRATION_PROMPTS, ranges_lacking, read_prompts

    if not ranges_lacking(checkpoint, with_static_scale(checkpoint.spec, recipe)):
        return None
    file = given or checkpoint.path / "calibration.jsonl"
    if not file.is_file():
        raise InputError(
            f"recipe {recipe.name!r} rounds activations by scales that must be calibrated, and {file} is missing",
            expected='a file with one {"prompt": "..."} a line',
            fix="name one with --calibration FILE, or choose a recipe that needs none, such as w8a16",
        )
    for _ in read_prompts(file, CALIBRATION_PROMPTS):
        pass  # a malformed line is refused before anything is touched
    return file


def _prepare_folder(folder: Path) -> None:
    """Makes the folder, or refuses one that is somebody else's."""
    if folder.exists() and not folder.is_dir():
        raise BundleError(f"{folder} is a file", expected="a folder, or a name that is free")
    _refuse_links(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        foreign = sorted(path.name for path in folder.iterdir() if not _is_ours(path))
    except OSError as error:
        raise _unusable(folder, error) from error
    if foreign and not (folder / MANIFEST_FILE).exists():
        raise BundleError(
            f"{folder} is not a bundle and not empty: it holds {foreign[0]}",
            expected="a new or empty folder, or a bundle",
            fix="choose another output folder",
        )


def _refuse_links(folder: Path) -> None:
    """Refuses links in place of a bundle's own folders: a build would write and remove files of somebody else."""
    for name in _BUNDLE_FOLDERS:
        for path in (folder / name, *(folder / name).glob("sm*")):
            if path.is_symlink():
                raise BundleError(f"{path} is a link", expected="a folder of the bundle", fix="remove the link")


def _is_ours(path: Path) -> bool:
    """Whether it is something that a build has beside the bundle's files while it runs."""
    return path.name == LOCK_FILE or path.name in _LEFTOVERS


def _take_over(folder: Path, wanted: Manifest, overwrite: bool) -> Manifest:
    """The manifest to go on from: a new one, or that of an earlier build with what it finished."""
    if not (folder / MANIFEST_FILE).exists():
        wanted.write(folder)
        return wanted
    try:
        found = Manifest.read(folder)
    except BundleError:
        ours = {*_BUNDLE_FILES, *_BUNDLE_FOLDERS}
        foreign = sorted(p.name for p in folder.iterdir() if p.name not in ours and not _is_ours(p))
        if not overwrite:
            raise
        if foreign:
            raise BundleError(
                f"{folder} has a {MANIFEST_FILE} that is not readable as a bundle's, and holds {foreign[0]}",
                expected="nothing but a bundle's files where --overwrite is given",
                fix="choose another output folder",
            ) from None
        wanted.write(folder)
        return wanted
    differences = _differences(found, wanted)
    if differences and not overwrite:
        raise BundleError(
            f"{folder} holds a bundle of another build: {'; '.join(differences)}",
            expected="the same checkpoint, target, recipe, max_context and max_batch",
            fix="choose another output folder, or replace that bundle with --overwrite",
        )
    if found.spec != wanted.spec or found.recipe != wanted.recipe:
        # Nothing of the old bundle fits, and its graphs would contradict the new manifest.
        manifest = wanted
    else:
        # Finished stages stay as far as their own inputs did: each is asked in its turn.
        stages = {**wanted.stages, **{name: found.stages[name] for name in wanted.stages if name in found.stages}}
        engine = found.engine
        if found.target.backend != wanted.target.backend:
            stages["engine"], engine = StageRecord(), None
        manifest = wanted.model_copy(update={"stages": stages, "graphs": found.graphs, "engine": engine})
    if manifest != found:
        manifest.write(folder)
    return manifest


def _differences(found: Manifest, wanted: Manifest) -> list[str]:
    """What the two were built from or for, where they differ, in the user's words."""
    differences = []
    if found.checkpoint != wanted.checkpoint or found.spec != wanted.spec:
        differences.append("another checkpoint")
    if found.target != wanted.target:
        same_name = found.target.name == wanted.target.name
        differences.append(f"target {found.target.name}" + (" with other facts" if same_name else ""))
    if found.recipe != wanted.recipe:
        same_name = found.recipe.name == wanted.recipe.name
        differences.append(f"recipe {found.recipe.name}" + (" with other formats" if same_name else ""))
    if found.max_batch != wanted.max_batch:
        differences.append(f"max_batch {found.max_batch} instead of {wanted.max_batch}")
    if found.max_context != wanted.max_context:
        differences.append(f"max_context {found.max_context} instead of {wanted.max_context}")
    return differences


def _bring_up_to_date(stage: Stage, job: Job, manifest: Manifest) -> Manifest:
    """Runs a stage unless it is finished, unchanged in its inputs and undamaged; returns the manifest as written."""
    record = manifest.stages[stage.name]
    lacking = stage.lacks(manifest) if stage.lacks else None
    inputs = stage.input_hash(job, manifest, record.tools if lacking and record.state == "finished" else None)
    if record.state == "finished" and record.inputs == inputs:
        try:
            check_files(job.folder, record.files, progress=job.progress)
            return manifest
        except BundleError:
            pass  # a damaged file is made again
    if lacking:
        # Before anything is touched: what is here may still be of use elsewhere.
        target = manifest.target
        raise EngineElsewhereError(lacking, f"a machine with {target.title} and {target.backend}", str(job.folder))
    if record.state == "finished":
        # The record goes first: the old files must not vouch for the new ones, nor the other way round.
        manifest = _with_stage(manifest, stage.name, StageRecord())
        manifest.write(job.folder)
    made = stage.run(job, manifest)
    label = f"record {stage.name}"
    files = record_files(job.folder, made.files, label=label, progress=job.progress, known=made.known_hashes)
    if made.graphs is not None:
        manifest = manifest.model_copy(update={"graphs": made.graphs})
    if made.engine is not None:
        manifest = manifest.model_copy(update={"engine": made.engine})
    finished = StageRecord(state="finished", inputs=inputs, tools=stage.tool_versions(), files=files)
    manifest = _with_stage(manifest, stage.name, finished)
    manifest.write(job.folder)
    return manifest


def _with_stage(manifest: Manifest, name: StageName, record: StageRecord) -> Manifest:
    return manifest.model_copy(update={"stages": {**manifest.stages, name: record}})


def _sweep(folder: Path, manifest: Manifest) -> None:
    """Removes what killed builds and replaced bundles left behind: the bundle is its manifest and what that lists."""
    for path in folder.iterdir():
        stale = path.name in _BUNDLE_FILES and path.name != MANIFEST_FILE and path.name not in manifest.files
        if path.is_file() and (stale or path.name in _LEFTOVERS):
            path.unlink()
    for name in _BUNDLE_FOLDERS:
        inner = folder / name
        if not inner.is_dir() or inner.is_symlink():
            continue
        for path in sorted(inner.rglob("*"), reverse=True):
            relative = path.relative_to(folder).as_posix()
            kept = relative in manifest.files or (name == "cache" and manifest.target.backend != "onnxruntime")
            if path.is_file() and not kept and _IN_FOLDERS.fullmatch(relative):
                path.unlink()
            elif path.is_dir() and not path.is_symlink() and not any(path.iterdir()):
                path.rmdir()
        if not any(inner.iterdir()):
            inner.rmdir()


@contextmanager
def _explained(what: str, folder: Path) -> Iterator[None]:
    """Turns whatever a stage may raise into one of our errors. Ctrl-C passes through."""
    try:
        yield
    except DgcompileError:
        raise
    except Exception as error:
        cause = _os_error(error)
        if cause is not None and cause.errno in _DISK_FULL:
            raise StageError(
                f"{what}: no space left for {cause.filename or folder} ({cause.strerror})",
                expected="more free space, or a larger file size limit",
                fix=f"free some, then {_RESUME}",
            ) from error
        if cause is not None and cause.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise _unusable(folder, cause) from error
        reason = next((line for line in str(error).splitlines() if line.strip()), "")
        raise StageError(
            f"{what} failed: {type(error).__name__}: {reason}", fix="run it again with --debug for the traceback"
        ) from error


def _os_error(error: BaseException) -> OSError | None:
    """The operating system's complaint behind ``error``, if there is one."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, OSError):
        seen = seen.__cause__ or seen.__context__
    return seen


def _unusable(folder: Path, error: OSError) -> BundleError:
    return BundleError(
        f"{error.filename or folder} cannot be written ({error.strerror or error})",
        expected="an output folder that you may write into",
        fix="choose another output folder or change its permissions",
    )
