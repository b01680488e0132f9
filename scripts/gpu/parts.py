"""The check's parts, each in a process of its own: a crash, or one killed for time, costs no other its results."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from gpu.device import Rates

HEAD_DIMS = (32, 64, 128, 256, 512)
FORMAT_NAMES = ("float", "fp8", "int4 g32", "int4 g64", "w4a8 g32", "w4a8 g64")


@dataclass(frozen=True)
class Part:
    """One process.

    Attributes:
        name: what ``--part`` takes.
        numeric: it checks numbers and may share the device with others; else it times and must be alone.
        seconds: with less time left than this it is not begun.
        ours: what it runs is this project's, so that its crash fails the check.
    """

    name: str
    numeric: bool
    seconds: int
    ours: bool = True


def numeric_parts(cpu: bool, quick: bool) -> list[Part]:
    """The numeric checks, longest first, so that none is left alone at the end."""
    if cpu:
        names = ["attention 32", "experts w4a8 g64"]
        names += [] if quick else ["experts float", "experts fp8", "experts int4 g32"]
    else:
        head_dims = (64, 256, 512) if quick else HEAD_DIMS
        formats = [name for name in FORMAT_NAMES if not quick or name.split()[-1] != "g32"]
        names = [f"attention {head_dim}" for head_dim in reversed(head_dims)] + ["attention real"]
        names += [f"experts {name}" for name in reversed(formats)]
    return [Part(name, True, 10) for name in names]


def timing_parts(cpu: bool, quick: bool, step_formats: list[str]) -> list[Part]:
    """The timings, the most telling first.

    Args:
        step_formats: formats of the experts that the whole model fits the device's memory in, the most telling first.
    """
    parts = [Part("time kernels", False, 15), Part("time torch", False, 10, ours=False)]
    if cpu:
        more = [] if quick else [parts[1], Part("layer int4 g64", False, 5)]
        return [parts[0], *more, Part("step float", False, 5)]
    steps = [Part(f"step {name}", False, 25) for name in step_formats]
    layers = [Part(f"layer {name}", False, 20) for name in ("float", "int4 g32")]
    if quick:
        return [*parts, *steps[:1]]
    return [*parts, *steps[:1], layers[0], Part("transformers", False, 40, ours=False), *steps[1:], *layers[1:]]


def run_part(name: str, arguments: argparse.Namespace) -> None:
    """Do the work of one part; called in its own process."""
    import torch

    from gpu import device, numeric, speed
    from gpu.device import Rates
    from gpu.records import emit, skip
    from gpu.weights import FORMATS

    torch.set_grad_enabled(False)
    where = torch.device(arguments.device)
    if where.index is not None:
        torch.cuda.set_device(where)  # Triton launches on the current device
    if name == "device":
        described = device.describe(where)
        free = described.get("free_memory_bytes")
        formats = ["float"] if free is None else speed.step_formats(free)
        emit("device", "device", **described, step_formats=formats)
        return
    rates = Rates(**json.loads(arguments.rates)) if arguments.rates else device.measured_rates(where)
    kind, _, rest = name.partition(" ")
    quick: bool = arguments.quick
    if name == "attention real":
        numeric.check_attention_at_real_size(where, quick)
    elif kind == "attention":
        numeric.check_attention(int(rest), where, quick)
        if where.type == "cpu":
            numeric.check_attention_at_real_size(where, quick)
    elif kind == "experts":
        numeric.check_experts(FORMATS[rest], where)
        numeric.check_experts_at_real_size(FORMATS[rest], where, quick)
    elif name == "time kernels":
        _time_kernels(where, rates, quick)
    elif name == "time torch":
        speed.time_attention(where, rates, baseline=True)
        speed.time_experts(FORMATS["float"], where, rates, baseline=True)
    elif kind == "layer":
        speed.check_layer(FORMATS[rest], where, rates)
    elif kind == "step":
        try:
            speed.time_step(FORMATS[rest], where, rates)
        except torch.OutOfMemoryError as error:  # says nothing about the kernels
            skip(name, str(error).splitlines()[0])
    elif name == "transformers":
        speed.time_transformers(where, rates)
    else:
        raise ValueError(f"there is no part {name!r}")
    _report_tiles(name == "time kernels")


def _time_kernels(where: torch.device, rates: Rates, quick: bool) -> None:
    from gpu import speed
    from gpu.weights import FORMATS

    formats = ["float"] if where.type == "cpu" else [name for name in FORMATS if not quick or name.split()[-1] != "g32"]
    speed.time_attention(where, rates, baseline=False)
    for name in formats:
        speed.time_experts(FORMATS[name], where, rates, baseline=False)


def _report_tiles(every: bool) -> None:
    """Emit the tiles of what was timed, and in any part those that had to shrink."""
    from gpu import kernels
    from gpu.records import emit

    for what, tile in kernels.used.items() if every else ():
        emit("info", f"{what}: tile", how=tile)
    for what, how in kernels.shrunk.items():
        emit("info", f"{what}: smaller tile", how=how)
