"""The Triton kernels of MixtureOfExperts: numbers in Triton's interpreter, resources of the cubins. No GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from dgcompile.plugins.moe.formats import WeightFormat

pytest.importorskip("triton", reason="triton (extra `build`) is not installed: NO kernel is tested")

from dgcompile.plugins.compile import CompiledKernel, compile_launch
from dgcompile.plugins.launch import Launch
from dgcompile.plugins.moe import launch
from dgcompile.plugins.moe.launch import Shape

REAL = Shape(tokens=256, top_k=8, experts=128, hidden=2816, inner=704)

# Error over the norm of the output, against float64 with the weights that the packed ones stand for. Those are exact
# in the kernel, so only the arithmetic is left: fp32 sums of 80 and 40 terms; in fp16 the rounding (2**-11) of the
# inner activations, of each expert's result and of the output. bf16 is not run: the interpreter computes it wrongly.
ARITHMETIC = {"float32": 1e-6, "float16": 1e-3}
# The same against a reference that rounds activations to E4M3 likewise. With inner activations in fp16, a value
# near a tie may round to the other side, which moves it by up to 2**-3 of itself: few do.
ROUNDED = {"float32": 1e-6, "float16": 3e-2}
# Against exact activations: E4M3 keeps 4 bits, an error of 2.6 % of a value on average, twice in a row: 4 %.
FP8_ACTIVATIONS = 8e-2


@pytest.mark.parametrize("weight_format", ["float", "fp8", "int4", "w4a8"])
def test_numbers_in_the_interpreter(weight_format: WeightFormat) -> None:
    command = [sys.executable, "-m", "tests.plugins.moe_interpreter", weight_format]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert len(results) >= 12
    for *case, result in results:
        dtype = case[1]
        if weight_format == "w4a8":
            assert result["norm"] < FP8_ACTIVATIONS, (case, result)
            assert result["norm_rounded"] < ROUNDED[dtype], (case, result)
        else:
            assert result["norm"] < ARITHMETIC[dtype], (case, result)
            assert result["largest"] < 4 * ARITHMETIC[dtype], (case, result)
        if case[0] == "random":
            assert result["same_bits"], (case, result)
            assert result["zero_row"], (case, result)


def steps(weight_format: WeightFormat, group: int, tile: launch.Tile, activations: str = "bf16") -> dict[str, Launch]:
    """By function, the rounding of hidden states before that of the inner activations."""
    found: dict[str, Launch] = {}
    for step in launch.launches(REAL, weight_format, group, tile, activations):
        name = step.function.removesuffix("_kernel")
        found[f"{name}_again" if name in found else name] = step
    return found


def check_resources(compiled: CompiledKernel) -> None:
    assert compiled.spilled_bytes == 0
    assert compiled.registers <= 255  # more shared memory than there is: compile_kernel raises


@pytest.mark.parametrize("sm", [89, 90, 120])
@pytest.mark.parametrize(
    # "float" is the published model's own: test_published_kernels compiles it.
    ("weight_format", "group"),
    [("fp8", 0), ("int4", 32), ("int4", 64), ("w4a8", 64)],
)
def test_products_at_the_real_sizes(weight_format: WeightFormat, group: int, sm: int) -> None:
    number = "e4m3" if weight_format == "w4a8" else "bf16"
    width = 32 if weight_format == "w4a8" else 16
    for tile in launch.TILES[sm, weight_format]:
        for name in ("gate_up", "down"):
            compiled = compile_launch(steps(weight_format, group, tile)[name], sm)
            check_resources(compiled)
            if sm == 90:  # 64 weight rows by the tokens of a tile
                shape = f"m64n{tile.block_m}k{width}"
                assert f"wgmma.mma_async.sync.aligned.{shape}.f32.{number}.{number}" in compiled.ptx
                assert "mma.sync.aligned.m16n8" not in compiled.ptx
            else:
                assert f"mma.sync.aligned.m16n8k{width}.row.col.f32.{number}.{number}.f32" in compiled.ptx
            assert "cp.async" in compiled.ptx  # loads run ahead of the tensor cores
            assert compiled.blocks_per_sm >= 2  # one computes while the other waits


@pytest.mark.parametrize("sm", [90, 120])
def test_the_other_steps_at_the_real_sizes(sm: int) -> None:
    tile = launch.tile_for(sm, "w4a8", REAL)
    for name in ("route", "round_rows", "round_rows_again", "combine"):
        compiled = compile_launch(steps("w4a8", 32, tile)[name], sm)
        check_resources(compiled)
        assert "atom.global" not in compiled.ptx and "red.global" not in compiled.ptx


@pytest.mark.parametrize("weight_format", ["float", "fp8", "int4", "w4a8"])
def test_fp16_activations_compile(weight_format: WeightFormat) -> None:
    tile = launch.tile_for(90, weight_format, REAL)
    group = 64 if weight_format in ("int4", "w4a8") else 0
    compiled = compile_launch(steps(weight_format, group, tile, "fp16")["down"], 90)
    check_resources(compiled)
    assert ("f32.e4m3.e4m3" if weight_format == "w4a8" else "f32.f16.f16") in compiled.ptx


def test_the_same_bytes_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = steps("int4", 32, launch.tile_for(120, "int4", REAL))["down"]
    cubins = []
    for folder in ("first", "second"):  # or the second would come out of the cache
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / folder))
        cubins.append(compile_launch(step, 120).cubin)
        assert list((tmp_path / folder).rglob("*.cubin"))
    assert cubins[0] == cubins[1]


@pytest.mark.parametrize("tokens", [1, 2, 255, 256, 5000])
@pytest.mark.parametrize("experts", [1, 128])
def test_tiles_never_exceed_their_limit(tokens: int, experts: int) -> None:
    """The worst case: as many experts as possible with one pair more than whole tiles."""
    block_m, pairs = 16, tokens
    in_use = min(experts, pairs)
    counts = [1] * in_use
    counts[0] += (pairs - in_use) % block_m
    for index in range((pairs - in_use) // block_m):
        counts[index % in_use] += block_m
    assert sum(counts) == pairs
    limit = launch.tile_limit(pairs, experts, block_m)
    assert sum(-(-count // block_m) for count in counts) <= limit <= pairs // block_m + in_use


def test_the_workspace_is_what_its_formula_says() -> None:
    tile = launch.tile_for(120, "w4a8", REAL)
    buffers, size = launch.workspace(REAL, "w4a8", tile, 2)
    limit = launch.tile_limit(REAL.pairs, REAL.experts, tile.block_m)
    assert limit == 248
    formula = 4 * (limit * 17 + 1) + 2048 * (704 + 2816) * 2 + 256 * 2820 + 2048 * 708
    assert formula <= size < formula + 10 * 256
    places = sorted(buffers.values())
    assert all(offset + length <= following for (offset, length), (following, _) in pairwise(places))


def test_a_group_size_the_kernel_does_not_know() -> None:
    with pytest.raises(ValueError, match="group_size of int4 is 128, expected 32 or 64"):
        launch.launches(REAL, "int4", 128, launch.tile_for(90, "int4", REAL), "bf16")
