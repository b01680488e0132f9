"""The Triton kernels of BlockAttention: numerics in Triton's interpreter, resources of the compiled cubins. No GPU.

Triton reads TRITON_INTERPRET when a kernel is defined, so the numeric tests run in a process of their own: this file
as a script. The parametrised test asks it for one group of cases at a time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dgcompile.plugins.block_attention.launch import (
    Mode,
    Shape,
    choose_splits,
    launches,
    workspace,
    workspace_limit,
)
from dgcompile.plugins.block_attention.reference import block_attention as reference
from dgcompile.plugins.block_attention.tiles import (
    Tile,
    resident_programs,
    shared_memory_bytes,
    tile_for,
    uses_wgmma,
)
from dgcompile.plugins.compile import compile_kernel, compile_launch
from dgcompile.plugins.launch import SHARED_MEMORY_LIMIT, Launch
from tests.plugins.test_block_attention import random_case

pytest.importorskip("triton", reason="triton (extra `build`) is not installed: NO kernel is tested")

# Inputs are unit normal, outputs averages of values, so of size one at most a few. fp32: rounding of sums over at most
# 512 products. fp16: the weights (at most 1) and the result (at most 4) are each rounded to 11 bits; the reference
# gets the same rounded inputs. A wrong mask gives 1e-1.
BOUNDS = {"float32": 1e-5, "float16": 4e-3}
HEAD_DIMS = (32, 64, 128, 256, 512)
# window, cache capacity, past_length of each row
PASTS = [
    (0, 40, [0, 1]),
    (0, 40, [17, 40]),
    (8, 8, [0, 7]),  # window - 1
    (8, 8, [8, 9]),  # window, window + 1: the ring wraps
    (8, 8, [100, 5]),
    (1, 1, [0, 30]),
    (8, 30, [25, 30]),  # a window over a cache that is no ring
    (8, 20, [25, 19]),  # a ring larger than the window
    (24, 24, [20, 23]),  # past + block longer than the window
]


def worst_errors(head_dim: int, dtype: str) -> dict[str, float]:
    """Largest error of each case; runs in the interpreter's process."""
    import torch

    from dgcompile.plugins.block_attention.torch_call import block_attention

    errors = {}
    scale = head_dim**-0.5
    # Every window edge once, three kinds of past otherwise: masks depend on neither head_dim nor dtype.
    if head_dim == 32 and dtype == "float32":
        pasts = PASTS
    elif dtype == "float32":
        pasts = [PASTS[1], PASTS[4], PASTS[8]]
    else:
        pasts = [PASTS[4]]
    for window, capacity, past in pasts:
        for causal in (True, False):
            # 11 and 21 tokens fill no tile; 3 query heads to a KV head divide none either.
            for tokens, heads, kv_heads, splits in [(11, 4, 2, 1), (21, 3, 1, 3)]:
                arrays = random_case(np.random.default_rng(0), tokens, heads, kv_heads, head_dim, capacity, past)
                arrays = {
                    name: array if name == "past_length" else array.astype(dtype) for name, array in arrays.items()
                }
                expected = reference(**arrays, scale=scale, window=window, causal=causal)
                actual = block_attention(
                    *[torch.from_numpy(array) for array in arrays.values()],
                    scale=scale,
                    window=window,
                    causal=causal,
                    tile=Tile(16, 16, 4, 1),
                    splits=splits,
                ).numpy()
                error = float(np.abs(actual.astype(np.float64) - expected).max())
                # NaN is no JSON, and must fail.
                case = f"window {window}, capacity {capacity}, past {past}, causal {causal}, {tokens} tokens"
                errors[f"{case}, {splits} splits"] = error if np.isfinite(error) else 1e30
    return errors


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_agrees_with_reference(head_dim: int) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.plugins.test_block_attention_kernel", str(head_dim)],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    errors = json.loads(run.stdout)
    assert errors.keys() == BOUNDS.keys()
    for dtype, bound in BOUNDS.items():
        assert len(errors[dtype]) >= (12 if dtype == "float32" else 4)
        assert {case: error for case, error in errors[dtype].items() if error > bound} == {}, dtype


def real_launches(sm: int, head_dim: int, *, causal: bool, splits: int, dtype: str = "bf16") -> list[Launch]:
    # The model's own layers: 16 query heads; 512-wide ones share 2 KV heads and have no window.
    kv_heads, window = (2, 0) if head_dim == 512 else (8, 1024)
    shape = Shape(batch=1, tokens=256, heads=16, kv_heads=kv_heads, head_dim=head_dim, capacity=window or 32768)
    return launches(shape, Mode(1.0, window, causal), dtype, tile_for(sm, head_dim), splits)


# Widths 256 and 512 are those of the published model: test_published_kernels compiles them.
@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("sm", [90, 120])
def test_cubin(sm: int, head_dim: int) -> None:
    tile = tile_for(sm, head_dim)
    compiled = compile_launch(real_launches(sm, head_dim, causal=True, splits=4)[0], sm)
    print(
        f"sm {sm} head_dim {head_dim} {tile}: {compiled.registers} registers, "
        f"{compiled.shared_bytes} bytes shared, {compiled.blocks_per_sm} blocks"
    )
    assert compiled.spilled_bytes == 0
    assert compiled.shared_bytes <= shared_memory_bytes(sm, head_dim, tile) <= SHARED_MEMORY_LIMIT[sm]
    assert compiled.blocks_per_sm >= resident_programs(sm, head_dim, tile) >= 1
    assert ("wgmma.mma_async" in compiled.ptx) == uses_wgmma(sm, tile)
    assert ("mma.sync" in compiled.ptx) != uses_wgmma(sm, tile)
    assert f".target sm_{sm}a" in compiled.ptx
    assert "cp.async" in compiled.ptx  # loads run ahead of the products


@pytest.mark.parametrize("sm", [90, 120])
def test_combine_cubin(sm: int) -> None:
    compiled = compile_launch(real_launches(sm, 512, causal=False, splits=16)[1], sm)
    assert compiled.spilled_bytes == 0
    assert compiled.arguments == ("partial_sums", "partial_stats", "output", "rows", "splits")


def test_splits_fill_the_gpu() -> None:
    tile = Tile(64, 64, 8, 2)  # one program on a multiprocessor, by its registers

    def splits(batch: int, tokens: int, capacity: int) -> int:
        return choose_splits(Shape(batch, tokens, 16, 8, 128, capacity), 90, tile, 132)

    assert splits(32, 256, 1024) == 1  # 2048 programs
    assert splits(1, 128, 64 * 38) == 4  # 32 programs, each 40 tiles of keys
    assert splits(1, 1, 64 * 1000) == 16
    assert splits(1, 1, 1) in (1, 2)  # two tiles of keys: no more than two splits have work


@given(
    batch=st.integers(1, 8),
    tokens=st.integers(1, 512),
    capacity=st.integers(1, 40000),
    head_dim=st.sampled_from(HEAD_DIMS),
    sm=st.sampled_from([90, 120]),
)
def test_no_choice_of_splits_exceeds_the_workspace(
    batch: int, tokens: int, capacity: int, head_dim: int, sm: int
) -> None:
    tile = tile_for(sm, head_dim)
    shape = Shape(batch, tokens, 16, 2, head_dim, capacity)
    largest = Shape(8, 512, 16, 2, head_dim, 40000)
    _, size = workspace(shape, choose_splits(shape, sm, tile, 170))
    assert size <= workspace_limit(largest, sm, tile, 170)


def test_compile_needs_every_argument() -> None:
    from dgcompile.plugins.block_attention.kernel import combine_kernel

    step = real_launches(90, 512, causal=True, splits=2)[1]
    types = dict(zip(("partial_sums", "partial_stats", "output", "rows", "splits"), step.types, strict=True))
    with pytest.raises(ValueError, match="combine_kernel takes"):
        compile_kernel(combine_kernel, types, {"D": 512}, 90, 4, 2)
    with pytest.raises(ValueError, match="sm is 80"):
        compile_kernel(combine_kernel, types, {}, 80, 4, 2)
    with pytest.raises(ValueError, match="1 arguments but 5 types"):
        replace(step, arguments=("output",))


if __name__ == "__main__":
    print(json.dumps({dtype: worst_errors(int(sys.argv[1]), dtype) for dtype in BOUNDS}))
