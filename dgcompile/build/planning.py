"""The plan of a build before it is started: the checks of ``build``, from the shape of the model alone."""

from __future__ import annotations

from pathlib import Path

from dgcompile.build.kernels import plan_kernels
from dgcompile.build.limits import resolve_max_batch, resolve_max_context
from dgcompile.bundle import CHAT_TEMPLATE_FILE, GENERATION_CONFIG_FILE, MAX_BATCH, TOKENIZER_FILE, Manifest
from dgcompile.checkpoint import CONFIG_FILE, INDEX_FILE, SINGLE_FILE, Checkpoint, fetch_from_hub, is_hub_id
from dgcompile.config_file import read_json
from dgcompile.errors import BundleError, CheckpointError, InputError
from dgcompile.model_spec import ModelSpec
from dgcompile.plan import BuildPlan, Workload, make_plan
from dgcompile.plan.host import ASSETS, KERNELS
from dgcompile.recipe import Recipe
from dgcompile.target import Target
from dgcompile.weights_store import with_static_scale

_ASSETS = (TOKENIZER_FILE, CHAT_TEMPLATE_FILE, GENERATION_CONFIG_FILE)


def plan_build(
    source: str | Path,
    target: Target,
    recipe: Recipe,
    *,
    max_context: int | None = None,
    max_batch: int | None = None,
    tokens_per_step: float | None = None,
    output: Path | None = None,
) -> BuildPlan:
    """Plans a build without doing any of it. Reads ``config.json`` and, of a folder with weights, their headers.

    Args:
        source: a checkpoint's folder, its ``config.json``, or a hub id, of which only ``config.json`` is fetched.
        target: what to build for.
        recipe: the precision of each class of weight.
        max_context, max_batch: as of ``build``; on the CPU, ``max_batch`` is the rows of the batch that is planned for.
        tokens_per_step: tokens of a finished text that one denoising step gives each row; None for the usual.
        output: where the bundle would lie, for the disk space there; None for the current folder.

    Raises:
        TargetError, RecipeError, CheckpointError: the target does not run the recipe or the model.
        InputError: a number is out of range.
        MissingDependencyError: a hub id, but no huggingface_hub.
    """
    checkpoint, spec = _open(source)
    recipe = recipe.for_target(target) if checkpoint is None else settled_recipe(checkpoint, target, recipe)
    recipe.check_model(spec)
    if target.backend != "onnxruntime":
        plan_kernels(spec, recipe, target)
        batch = resolve_max_batch(target, max_batch) or 1
    else:
        batch = 1 if max_batch is None else max_batch
        if not 1 <= batch <= MAX_BATCH:
            raise InputError(f"max_batch is {batch}", expected=f"1 to {MAX_BATCH}")
    return plan_in_folder(
        Workload(spec, recipe, target, resolve_max_context(spec, max_context), batch),
        output or Path(),
        checkpoint.path if checkpoint else None,
        calibrates=recipe.needs_calibration and (checkpoint is None or _lacks_ranges(checkpoint, recipe)),
        tokens_per_step=tokens_per_step,
    )


def plan_in_folder(
    workload: Workload,
    folder: Path,
    source: Path | None,
    *,
    calibrates: bool,
    tokens_per_step: float | None = None,
) -> BuildPlan:
    """The plan of a build into a folder, which need not exist; what an earlier build left there counts.

    Args:
        workload: what to plan; the target has kernels for it.
        folder: of the bundle.
        source: folder of the checkpoint, for the size of its small files.
        calibrates: whether the build runs the model to take ranges of activations.
        tokens_per_step: tokens of a finished text that one denoising step gives each row; None for the usual.

    Raises:
        InputError: ``tokens_per_step`` is out of range.
    """
    files = [source / name for name in _ASSETS] if source else []
    assets = sum(file.stat().st_size for file in files if file.is_file())
    plan = make_plan(workload, calibrates=calibrates, assets=assets, tokens_per_step=tokens_per_step)
    return plan.in_folder(folder, _kept_files(folder, workload))


def settled_recipe(checkpoint: Checkpoint, target: Target, recipe: Recipe) -> Recipe:
    """The recipe that a build of a checkpoint follows: for the target, and rounding no weight twice."""
    return recipe.keeping_fp8(checkpoint.quantized, checkpoint.spec).for_target(target)


def _kept_files(folder: Path, workload: Workload) -> frozenset[str]:
    """Names, as plans have them, of the files that a build into a folder would keep: of the same model and recipe."""
    try:
        manifest = Manifest.read(folder)
    except BundleError:
        return frozenset()
    if manifest.spec != workload.spec or manifest.recipe != workload.recipe:
        return frozenset()
    kept = set(manifest.files)
    kept |= {KERNELS for name in kept if name.startswith(f"{KERNELS}/")}
    return frozenset(kept | ({ASSETS} if GENERATION_CONFIG_FILE in kept else set()))


def _open(source: str | Path) -> tuple[Checkpoint | None, ModelSpec]:
    """The checkpoint, where there is more of it than its config, and the model's shape."""
    path = Path(source).expanduser()
    if path.is_dir():
        if any((path / name).exists() for name in (SINGLE_FILE, INDEX_FILE)):
            checkpoint = Checkpoint.open(path)
            return checkpoint, checkpoint.spec
        path = path / CONFIG_FILE
    elif not path.is_file():
        if isinstance(source, Path) or not is_hub_id(source):
            raise CheckpointError(
                f"there is no {source}", expected="a checkpoint's folder, its config.json, or a hub id (org/name)"
            )
        path = fetch_from_hub(source, CONFIG_FILE)
    return None, ModelSpec.from_config(read_json(path), source=str(path))


def _lacks_ranges(checkpoint: Checkpoint, recipe: Recipe) -> bool:
    from dgcompile.quantize.calibration import ranges_lacking

    return bool(ranges_lacking(checkpoint, with_static_scale(checkpoint.spec, recipe)))
