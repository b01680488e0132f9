"""The plan of a build: everything that follows from shapes, formats and the target's facts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dgcompile.errors import InputError
from dgcompile.plan.device import DeviceMemory, device_memory, largest_batch, largest_context
from dgcompile.plan.host import Disk, HostMemory, disk, free_bytes, host_memory, machine_memory, present_bytes
from dgcompile.plan.roofline import StepTime, lacking_facts, step_time
from dgcompile.plan.weights import bytes_of, parameters_of
from dgcompile.plan.workload import Workload
from dgcompile.recipe import WeightClass
from dgcompile.weights_store import lay_out_store

DEFAULT_TOKENS_PER_STEP = 16.0
"""Tokens of a finished text that one denoising step gives, as published reports name it for this model's benchmarks. It
depends on the text: an estimate, and no promise."""


@dataclass(frozen=True)
class BuildPlan:
    """A planned build. Every figure but the bytes of weights and cache is an estimate.

    Attributes:
        workload: what is planned.
        parameters: by class of weight.
        weight_bytes: stored bytes by class of weight.
        device: memory of the device that runs it.
        device_has: that device's memory, in bytes: the target's, or this machine's for the CPU.
        context_fits: largest ``max_context`` that fits at this batch; None when none does.
        batch_fits: largest ``max_batch`` that fits at this context; None when none does.
        host: memory of the machine that builds it.
        disk: disk space of the bundle.
        calibrates: whether the build runs the model to take ranges of activations.
        step: the time of a denoising step; None where the target does not state what it takes.
        step_lacks: the fact that the target does not state.
    """

    workload: Workload
    parameters: Mapping[WeightClass, int]
    weight_bytes: Mapping[WeightClass, int]
    device: DeviceMemory
    device_has: int
    context_fits: int | None
    batch_fits: int | None
    host: HostMemory
    disk: Disk
    calibrates: bool
    step: StepTime | None
    step_lacks: str | None

    @property
    def fits(self) -> bool:
        """Whether the device has memory for it. On the CPU weights are mapped from the file: too little is slow, no
        error."""
        return self.device.total <= self.device_has

    def in_folder(self, folder: Path, finished: frozenset[str] = frozenset()) -> BuildPlan:
        """The plan with the disk space that a folder's file system has.

        Args:
            folder: of the bundle; it need not exist.
            finished: names of files there that are kept as they are.
        """
        present = present_bytes(folder, self.disk.files, finished)
        return replace(self, disk=replace(self.disk, present=present, free=free_bytes(folder), folder=folder))

    def to_values(self) -> dict[str, Any]:
        """As JSON data: bytes, seconds and FLOPs, see docs/plan.md."""
        workload, device, host = self.workload, self.device, self.host
        return {
            "target": workload.target.name,
            "recipe": workload.recipe.name,
            "max_context": workload.max_context,
            "max_batch": workload.max_batch,
            "parameters": sum(self.parameters.values()),
            "weights": {
                kind: {
                    "format": workload.recipe.weights.of(kind).text,
                    "parameters": count,
                    "bytes": self.weight_bytes[kind],
                }
                for kind, count in self.parameters.items()
            },
            "device": {
                "weights_bytes": device.weights,
                "bound_weights_bytes": device.bound_weights,
                "engine_weights_bytes": dict(device.engine_weights),
                "kv_cache_bytes": sum(device.kv_cache.values()),
                "kv_cache_bytes_by_kind": dict(device.kv_cache),
                "new_tokens_bytes": device.new_tokens,
                "self_conditioning_bytes": device.self_conditioning,
                "small_tensors_bytes": device.small_tensors,
                "workspace_bytes": device.workspace,
                "activations_bytes": dict(device.activations),
                "converted_weights_bytes": device.converted_weights,
                "allowance_bytes": device.allowance,
                "total_bytes": device.total,
                "memory_bytes": self.device_has,
                "fits": self.fits,
                "largest_max_context": self.context_fits,
                "largest_max_batch": self.batch_fits,
            },
            "host": {
                "needed_bytes": host.needed,
                "stages_bytes": dict(host.stages),
                "memory_bytes": host.machine,
                "available_bytes": host.available,
                "pinned_bytes": device.pinned_host,
                "calibrates": self.calibrates,
            },
            "disk": {
                "bundle_bytes": self.disk.bundle,
                "files_bytes": dict(self.disk.files),
                "present_bytes": self.disk.present,
                "needed_bytes": self.disk.needed,
                "free_bytes": self.disk.free,
            },
            "step": self._step_values(),
            "step_lacks": self.step_lacks,
        }

    def _step_values(self) -> dict[str, Any] | None:
        step = self.step
        if step is None:
            return None
        return {
            "floor_seconds": step.floor_seconds,
            "binding": step.binding,
            "memory_seconds": step.memory_seconds,
            "compute_seconds": step.compute_seconds,
            "estimated_seconds": step.seconds,
            "tokens_per_step": step.tokens_per_step,
            "floor_tokens_per_second": step.tokens_per_second(step.floor_seconds),
            "estimated_tokens_per_second": step.tokens_per_second(step.seconds),
            "work": {
                kind: {
                    "weight_bytes": round(part.weight_bytes),
                    "other_bytes": round(part.other_bytes),
                    "flops": part.flops,
                    "precision": part.precision,
                    "seconds": part.seconds,
                    "binding": part.binding,
                }
                for kind, part in step.work.items()
            },
        }


def make_plan(
    workload: Workload,
    *,
    calibrates: bool = False,
    assets: int = 0,
    tokens_per_step: float | None = None,
) -> BuildPlan:
    """Plans a build. Pure arithmetic, but for this machine's memory.

    Args:
        workload: what to plan; its target has kernels for the model, see ``dgcompile.build.kernels.plan_kernels``.
        calibrates: whether the build runs the model to take ranges of activations.
        assets: bytes of tokenizer, chat template and the like.
        tokens_per_step: tokens of a finished text that one denoising step gives each row; None for
            :data:`DEFAULT_TOKENS_PER_STEP`, or the canvas where that is shorter.

    Raises:
        InputError: ``tokens_per_step`` is no number of tokens.
    """
    canvas = workload.spec.canvas_length
    if tokens_per_step is None:
        tokens_per_step = min(DEFAULT_TOKENS_PER_STEP, float(canvas))
    if not 0 < tokens_per_step <= canvas:
        raise InputError(f"tokens_per_step is {tokens_per_step}", expected=f"a number above 0, at most {canvas}")
    store = lay_out_store(workload.spec, workload.recipe)
    device = device_memory(workload, store)
    has = workload.target.memory_bytes
    if has is None:
        has = machine_memory()
    return BuildPlan(
        workload=workload,
        parameters=parameters_of(workload.spec),
        weight_bytes=bytes_of(store),
        device=device,
        device_has=has,
        context_fits=largest_context(workload, store, has),
        batch_fits=largest_batch(workload, store, has),
        host=host_memory(workload, store, device, calibrates=calibrates),
        disk=disk(workload, store, device, assets=assets),
        calibrates=calibrates,
        step=step_time(workload, store, tokens_per_step),
        step_lacks=lacking_facts(workload),
    )
