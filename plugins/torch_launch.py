"""Launches on torch tensors, through Triton's own launcher: it compiles what it needs on the spot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from dgcompile.plugins.compile import kernel_function
from dgcompile.plugins.launch import Launch

TRITON_TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
"""Triton's names of the dtypes that activations may have."""


def allocate(
    places: Mapping[str, tuple[int, int]], size: int, dtypes: Mapping[str, torch.dtype], device: torch.device
) -> dict[str, Tensor]:
    """Buffers of a workspace, flat; ``places`` and ``size`` as ``launch.lay_out`` returns them."""
    memory = torch.empty(size, dtype=torch.uint8, device=device)
    return {name: memory[offset : offset + length].view(dtypes[name]) for name, (offset, length) in places.items()}


def call(launches: Iterable[Launch], tensors: Mapping[str, Tensor]) -> None:
    """Run launches in order on the tensors and buffers that their arguments name."""
    for step in launches:
        arguments = [tensors[argument] if isinstance(argument, str) else argument for argument in step.arguments]
        kernel_function(step.kernel)[step.grid](
            *arguments, **step.constants, num_warps=step.warps, num_stages=step.stages
        )


def compute_capability(device: torch.device) -> int:
    """Compute capability of a CUDA device that its tiles are listed under: 90 (Hopper) or 120 (Blackwell).

    Raises:
        ValueError: older than Hopper.
    """
    major, minor = torch.cuda.get_device_capability(device)
    if major < 9:
        name = torch.cuda.get_device_name(device)
        raise ValueError(f"{name} has compute capability {major}.{minor}, expected 9.0 or newer")
    return 90 if major == 9 else 120
