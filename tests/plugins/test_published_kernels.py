"""Every kernel that a build makes for the published model, compiled for every GPU and looked at. No GPU.

The largest module of these tests, because the kernels are: about a minute on two free cores.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton (extra `build`) is not installed: NO kernel is compiled")

from dgcompile.build.kernels import make_kernels, plan_attention, plan_experts, plan_kernels
from dgcompile.errors import RecipeError, TargetError
from dgcompile.model_spec import LayerSpec, ModelSpec
from dgcompile.plugins.block_attention.launch import Mode, Shape, choose_splits, launches
from dgcompile.plugins.block_attention.tiles import tile_for, uses_wgmma
from dgcompile.plugins.compile import disassemble
from dgcompile.plugins.kernel_library import INDEX_FILE, KernelLibrary, library_folder
from dgcompile.plugins.launch import SHARED_MEMORY_LIMIT, resident_blocks
from dgcompile.plugins.moe import launch as moe
from dgcompile.progress import Progress
from dgcompile.recipe import Recipe
from dgcompile.target import Target

TARGETS = {89: "rtx4090", 90: "h100", 120: "rtx5090"}


def published_spec() -> ModelSpec:
    """google/diffusiongemma-26B-A4B-it, with one layer of each kind."""
    sliding = LayerSpec(kind="sliding_attention", num_key_value_heads=8, head_dim=256, window=1024, has_v_proj=True)
    full = LayerSpec(kind="full_attention", num_key_value_heads=2, head_dim=512, window=0, has_v_proj=False)
    return ModelSpec(
        vocab_size=262144,
        hidden_size=2816,
        intermediate_size=2112,
        num_attention_heads=16,
        num_experts=128,
        top_k_experts=8,
        moe_intermediate_size=704,
        sliding_window=1024,
        canvas_length=256,
        max_position_embeddings=262144,
        final_logit_softcapping=30.0,
        rms_norm_eps=1e-6,
        hidden_activation="gelu_pytorch_tanh",
        layers=(sliding, full),
    )


@pytest.mark.parametrize("sm", TARGETS)
def test_kernels_of_the_published_model(sm: int, tmp_path: Path) -> None:
    target, recipe = Target.load(TARGETS[sm]), Recipe.load("bf16")
    launches = plan_kernels(published_spec(), recipe, target)
    files = make_kernels(tmp_path, launches, target, Progress())
    folder = tmp_path / library_folder(sm)
    assert sorted(files) == sorted(f"{library_folder(sm)}/{path.name}" for path in folder.iterdir())
    assert f"{library_folder(sm)}/{INDEX_FILE}" in files

    library = KernelLibrary.open(folder, sm)
    planned = {step.key: step for step in plan_attention(published_spec(), "bf16", sm)}
    planned |= {step.key: step for step in plan_experts(published_spec(), "bf16", sm, "float", 0)}
    assert planned.keys() == library.records.keys()
    for step in planned.values():
        record = library.record(step)
        sass = disassemble(library.cubin(record))
        blocks = resident_blocks(sm, record.threads, record.registers, record.shared_bytes)
        print(f"sm {sm} {step.key}: {record.registers} registers, {record.shared_bytes} bytes shared, {blocks} blocks")
        assert record.spilled_bytes == 0, step
        assert record.registers <= 255 and record.shared_bytes <= SHARED_MEMORY_LIMIT[sm], step
        assert blocks >= (2 if step.function in ("gate_up_kernel", "down_kernel") else 1), step
        if step.function == "attention_kernel":
            tile = tile_for(sm, int(step.constants["D"] or 0))
            assert ("HGMMA" if uses_wgmma(sm, tile) else "HMMA.16816.F32.BF16") in sass, step
        if step.function in ("gate_up_kernel", "down_kernel"):
            assert ("HGMMA" if sm == 90 else "HMMA.16816.F32.BF16") in sass, step
        # Atomic additions in global memory would make results vary from run to run; ATOMS counts integers on the chip.
        assert not re.search(r"\b(ATOMG?|REDG?)\.", sass), step


@pytest.mark.parametrize("batch", [1, 2, 8])
@pytest.mark.parametrize("sm", TARGETS)
def test_engines_ask_for_nothing_else(sm: int, batch: int) -> None:
    """Whatever shape a session runs, its kernels are among those of the plan."""
    spec = published_spec()
    planned = {step.key for step in plan_attention(spec, "bf16", sm) + plan_experts(spec, "bf16", sm, "float", 0)}
    asked = set()
    for tokens in (1, 7, 64, 255, 256, 512):
        for layer in spec.layers:
            for capacity in (1, 256, 1000, layer.window or 32768):
                shape = Shape(batch, tokens, 16, layer.num_key_value_heads, layer.head_dim, capacity)
                tile = tile_for(sm, layer.head_dim)
                splits = choose_splits(shape, sm, tile, Target.load(TARGETS[sm]).multiprocessors or 0)
                for causal in (True, False):
                    steps = launches(shape, Mode(1.0, layer.window, causal), "bf16", tile, splits)
                    asked |= {step.key for step in steps}
        experts = moe.Shape(batch * tokens, 8, 128, 2816, 704)
        steps = moe.launches(experts, "float", 0, moe.tile_for(sm, "float", experts), "bf16")
        asked |= {step.key for step in steps}
    assert asked <= planned


def test_what_there_are_no_kernels_for() -> None:
    spec, gpu = published_spec(), Target.load("rtx5090")
    with pytest.raises(RecipeError, match=r"'fp32' computes in float32 .* no kernels for"):
        plan_kernels(spec, Recipe.load("fp32"), gpu)
    older = gpu.model_copy(update={"compute_capability": "8.6"})
    with pytest.raises(TargetError, match=r"compute capability 8\.6, which has no kernels; expected 8\.9"):
        plan_kernels(spec, Recipe.load("bf16"), older)
    odd = spec.model_copy(update={"layers": (spec.layers[0].model_copy(update={"head_dim": 96}),)})
    with pytest.raises(TargetError, match="head_dim is 96, expected a power of two"):
        plan_kernels(odd, Recipe.load("bf16"), gpu)
