"""Ahead-of-time compilation of kernels in the Triton language: a cubin for one compute capability, no GPU needed.

The compiler's options are all given here, never left to the environment, so that two builds give the same bytes.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dgcompile.plugins.launch import SHARED_MEMORY_LIMIT, Constant, Launch, resident_blocks


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel ready to be loaded by the CUDA driver.

    Attributes:
        entry: name of the function in the cubin.
        sm: compute capability that the cubin is for; it is compiled for the ``a`` variant where there is one
            (not of SM 89), and then runs on no other.
        cubin: what ``cuModuleLoadData`` takes.
        ptx: the assembly that the cubin was made from.
        arguments: names of the arguments to pass, in order. Two null pointers follow them in every launch: the
            scratch spaces that Triton adds to each signature and that kernels here must not need.
        threads: threads in a block.
        shared_bytes: dynamic shared memory of a launch.
        registers: registers of a thread.
        spilled_bytes: stack of a thread. Kernels without local arrays have one only where registers were spilled.
    """

    entry: str
    sm: int
    cubin: bytes
    ptx: str
    arguments: tuple[str, ...]
    threads: int
    shared_bytes: int
    registers: int
    spilled_bytes: int

    @property
    def blocks_per_sm(self) -> int:
        """Blocks that fit on one multiprocessor by registers, shared memory and threads."""
        return resident_blocks(self.sm, self.threads, self.registers, self.shared_bytes)


def kernel_function(kernel: str) -> Any:
    """The Triton function that a :class:`~dgcompile.plugins.launch.Launch` names: importing it needs triton."""
    module, name = kernel.rsplit(".", 1)
    return getattr(importlib.import_module(f"dgcompile.plugins.{module}"), name)


def compile_launch(launch: Launch, sm: int) -> CompiledKernel:
    """The kernel of one launch for compute capability ``sm``; errors as in :func:`compile_kernel`."""
    function = kernel_function(launch.kernel)
    parameters = [name for name in function.arg_names if name not in launch.constants]
    if len(parameters) != len(launch.types):
        raise ValueError(f"{launch.kernel} takes {parameters}; types for {len(launch.types)} arguments")
    signature = dict(zip(parameters, launch.types, strict=True))
    return compile_kernel(function, signature, launch.constants, sm, launch.warps, launch.stages)


def compile_kernel(
    fn: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Constant],
    sm: int,
    num_warps: int,
    num_stages: int,
) -> CompiledKernel:
    """Compile a ``@triton.jit`` function.

    Args:
        fn: the function. Under TRITON_INTERPRET=1 there is nothing to compile: that is an error.
        signature: argument name -> Triton type ("*fp16", "i32"...). A suffix ":16" promises that the pointer or number
            is a multiple of 16, without which no load is wider than one element.
        constexprs: compile-time arguments by name.
        sm: 89, 90 or 120.
        num_warps, num_stages: warps in a block, stages of a pipelined loop.

    Raises:
        ValueError: an argument has neither type nor value, or both; or ``sm`` is unknown.
        RuntimeError: more shared memory than the SM has, or a kernel that wants scratch memory.
    """
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if sm not in SHARED_MEMORY_LIMIT:
        raise ValueError(f"sm is {sm}, expected one of {sorted(SHARED_MEMORY_LIMIT)}")
    if not isinstance(fn, triton.runtime.JITFunction):
        raise ValueError(f"{fn!r} is no compilable kernel; is TRITON_INTERPRET set?")
    names = list(fn.arg_names)
    if sorted(names) != sorted([*signature, *constexprs]):
        raise ValueError(f"{fn.__name__} takes {names}; types for {list(signature)}, values for {list(constexprs)}")

    types = {name: signature[name].split(":")[0] if name in signature else "constexpr" for name in names}
    multiples = {names.index(name): kind.split(":")[1] for name, kind in signature.items() if ":" in kind}
    source = ASTSource(
        fn,
        types,
        constexprs=dict(constexprs),
        attrs={(index,): [["tt.divisibility", int(multiple)]] for index, multiple in multiples.items()},
    )
    # enable_fp_fusion: multiply-add in one rounding; its default comes from the environment and is about to change.
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
    with knobs.compilation.scope():
        # Line tables hold the path of this installation: other bytes on another machine.
        knobs.compilation.disable_line_info = True
        compiled = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)

    metadata = compiled.metadata
    if metadata.shared > SHARED_MEMORY_LIMIT[sm]:
        raise RuntimeError(
            f"{fn.__name__} wants {metadata.shared} bytes of shared memory, SM {sm} has {SHARED_MEMORY_LIMIT[sm]}"
        )
    if metadata.global_scratch_size:
        raise RuntimeError(f"{fn.__name__} wants {metadata.global_scratch_size} bytes of scratch memory for each block")
    cubin = compiled.asm["cubin"]
    registers, stack = _resources(cubin)
    return CompiledKernel(
        entry=metadata.name,
        sm=sm,
        cubin=cubin,
        ptx=compiled.asm["ptx"],
        arguments=tuple(name for name in names if name in signature),
        threads=metadata.num_warps * 32,
        shared_bytes=metadata.shared,
        registers=registers,
        spilled_bytes=stack,
    )


def _cuobjdump(option: str, cubin: bytes) -> str:
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, option, str(path)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes of a thread, as the assembler wrote them into the cubin."""
    report = _cuobjdump("--dump-resource-usage", cubin)
    found = re.search(r"REG:(\d+) STACK:(\d+)", report)
    if found is None:
        raise RuntimeError(f"cuobjdump says nothing about registers:\n{report}")
    return int(found[1]), int(found[2])


def disassemble(cubin: bytes) -> str:
    """The machine instructions (SASS) of a cubin."""
    return _cuobjdump("--dump-sass", cubin)
