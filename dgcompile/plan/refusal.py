"""What cannot fit is refused before any work, with the figures that say so."""

from __future__ import annotations

from dgcompile.errors import InputError, StageError
from dgcompile.plan.build_plan import BuildPlan


def refuse_what_cannot_fit(plan: BuildPlan) -> None:
    """Refuses a build that the target's device, or this machine's memory or disk, is too small for.

    Args:
        plan: in the folder of the bundle, see :meth:`BuildPlan.in_folder`.

    Raises:
        InputError: the memory of the target's device does not suffice.
        StageError: this machine's memory or disk does not.
    """
    refusal = refusal_of(plan)
    if refusal is not None:
        raise refusal


def refusal_of(plan: BuildPlan) -> InputError | StageError | None:
    """Why a build would be refused here; None for one that would not.

    Weights of the CPU target are mapped from their file: too little memory makes it slow, so it is not refused.
    """
    if plan.workload.on_gpu and not plan.fits:
        return InputError(
            f"{plan.workload.target.title} has {_size(plan.device_has)} and would need {_size(plan.device.total)} "
            f"({_parts(plan)}) for recipe {plan.workload.recipe.name!r}, {plan.workload.max_context} tokens and "
            f"{plan.workload.max_batch} rows",
            expected=_expected(plan),
            fix="`dgcompile plan` shows what takes how much",
        )
    # TensorRT builds engines on the card's own machine, which may be another one.
    elsewhere = {"engine"} if plan.workload.target.backend == "tensorrt" else set()
    here = {stage: size for stage, size in plan.host.stages.items() if stage not in elsewhere}
    stage = max(here, key=lambda name: here[name])
    if here[stage] > plan.host.machine:
        advice = "choose a recipe without static scales, such as w8a16" if stage == "calibration" else None
        return StageError(
            f"stage {stage} needs about {_size(here[stage])} of memory and this machine has {_size(plan.host.machine)}",
            expected="a machine with more memory",
            fix=advice or "build on another machine and copy the bundle",
        )
    disk = plan.disk
    if disk.free is not None and disk.needed > disk.free:
        there = f", {_size(disk.present)} of it are there" if disk.present else ""
        return StageError(
            f"no space left for {disk.folder or 'the bundle'}: it takes about {_size(disk.bundle)}{there}, and "
            f"{_size(disk.free)} are free on its disk",
            expected=f"{_size(disk.needed)} of free space",
            fix="free some, then run the same command again, or choose another output folder",
        )
    return None


def _expected(plan: BuildPlan) -> str:
    """Which limits would fit."""
    if plan.context_fits is not None:
        return f"a max_context of at most {plan.context_fits} at that batch, or a recipe with fewer bits"
    if plan.batch_fits is not None:
        return f"a max_batch of at most {plan.batch_fits} at that context, or a recipe with fewer bits"
    return "a recipe with fewer bits, or another target"


def _parts(plan: BuildPlan) -> str:
    device = plan.device
    parts = {
        "weights": device.weights,
        "KV cache": sum(device.kv_cache.values()),
        "activations": device.workspace,
        "the rest": device.new_tokens + device.self_conditioning + device.small_tensors + device.allowance,
    }
    return ", ".join(f"{name} {_size(size)}" for name, size in parts.items())


def _size(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.2f} MB"
