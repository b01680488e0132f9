"""One kernel call, as data: planned without a GPU or a compiler, then compiled, stored, looked up or launched."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

Constant = int | float | bool | str | None

SHARED_MEMORY_LIMIT = {89: 99 * 1024, 90: 227 * 1024, 120: 99 * 1024}
"""Compute capability (major * 10 + minor) -> dynamic shared memory that one block of threads may ask for, in bytes."""

THREAD_LIMIT = {89: 1536, 90: 2048, 120: 1536}
"""Compute capability -> threads that one multiprocessor runs at once."""


@dataclass(frozen=True)
class Launch:
    """Everything that compiling a kernel ahead of time and launching it need.

    Attributes:
        kernel: where the Triton function is, within ``dgcompile.plugins``: "block_attention.kernel.attention_kernel".
        arguments: run-time arguments in the order of the function's parameters: the name of a tensor or buffer, or a
            number.
        types: Triton's type of each argument ("*fp16:16", "i32"...), see ``compile.compile_kernel``.
        constants: compile-time arguments by name.
        grid: thread blocks.
        warps: warps in a block.
        stages: stages of a pipelined loop.
    """

    kernel: str
    arguments: tuple[str | int | float, ...]
    types: tuple[str, ...]
    constants: Mapping[str, Constant]
    grid: tuple[int, int, int]
    warps: int = 4
    stages: int = 1

    def __post_init__(self) -> None:
        if len(self.arguments) != len(self.types):
            raise ValueError(f"{self.kernel}: {len(self.arguments)} arguments but {len(self.types)} types")

    @property
    def function(self) -> str:
        """Name of the Triton function alone."""
        return self.kernel.rsplit(".", 1)[1]

    @property
    def key(self) -> str:
        """Identifies what has to be compiled; launches that differ only in argument values or grid share it."""
        compiled = [self.kernel, list(self.types), sorted(self.constants.items()), self.warps, self.stages]
        return f"{self.function}-{hashlib.sha256(json.dumps(compiled).encode()).hexdigest()[:16]}"


def resident_blocks(sm: int, threads: int, registers: int, shared_bytes: int) -> int:
    """Blocks of threads that fit on one multiprocessor; 0 when not even one does.

    Args:
        sm: compute capability, major * 10 + minor.
        threads: of a block.
        registers: of a thread.
        shared_bytes: dynamic shared memory of a block.
    """
    # Registers are given to a warp in units of 256; each block takes 1 KB of shared memory for the system.
    by_registers = 65536 // (aligned(registers * 32, 256) * (threads // 32))
    by_shared = (SHARED_MEMORY_LIMIT[sm] + 1024) // (shared_bytes + 1024)
    return min(by_registers, by_shared, THREAD_LIMIT[sm] // threads)


def aligned(size: int, unit: int) -> int:
    """``size`` rounded up to whole units."""
    return -(-size // unit) * unit


def lay_out(sizes: Mapping[str, int], alignment: int = 256) -> tuple[dict[str, tuple[int, int]], int]:
    """Buffers of one workspace, one after the other.

    Args:
        sizes: bytes of each buffer.
        alignment: of each buffer, in bytes.

    Returns:
        Offset and size of each buffer; bytes of the whole.
    """
    places, end = {}, 0
    for name, size in sizes.items():
        places[name] = (end, size)
        end += aligned(size, alignment)
    return places, end
