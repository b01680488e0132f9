"""How the MixtureOfExperts kernels are launched: tile sizes, workspace, and the calls for torch tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import triton

from dgcompile.plugins.compile import CompiledKernel, compile_kernel
from dgcompile.plugins.moe import kernel, routing
from dgcompile.plugins.moe.formats import INT4_GROUPS, WeightFormat

if TYPE_CHECKING:
    from torch import Tensor

ALIGNMENT = 256  # of each buffer in the workspace, in bytes
ROUTE_CHUNK = 1024  # pairs that the routing reads at once
COMBINE_BLOCK = 1024  # columns that a program of the combination sums


@dataclass(frozen=True)
class Tile:
    """Shape of the two grouped products.

    Attributes:
        block_m: pairs in a tile.
        block_n: output columns of a program.
        block_k: reduction step. INT4 always steps by 64.
        warps, stages: as Triton takes them.
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int


# By SM, format, and whether an expert gets more than 32 pairs on average. The weights stream from memory once, so what
# counts is bytes in flight with two blocks or more on a multiprocessor; SM120 has two fifths of SM90's shared memory to
# keep loads waiting in. Limits and use are checked on the cubins; nothing here has been timed on a GPU yet.
TILES: dict[tuple[int, WeightFormat], tuple[Tile, Tile]] = {
    (90, "float"): (Tile(16, 64, 128, 4, 3), Tile(64, 64, 64, 4, 4)),
    (90, "fp8"): (Tile(16, 64, 128, 4, 4), Tile(64, 64, 64, 4, 4)),
    (90, "int4"): (Tile(16, 64, 64, 4, 4), Tile(64, 64, 64, 4, 4)),
    (90, "w4a8"): (Tile(16, 64, 64, 4, 4), Tile(64, 64, 64, 4, 4)),
    (120, "float"): (Tile(16, 64, 64, 4, 3), Tile(64, 64, 64, 4, 3)),
    (120, "fp8"): (Tile(16, 64, 128, 4, 3), Tile(64, 64, 64, 4, 3)),
    (120, "int4"): (Tile(16, 64, 64, 4, 4), Tile(64, 64, 64, 4, 3)),
    (120, "w4a8"): (Tile(16, 64, 64, 4, 4), Tile(64, 64, 64, 4, 3)),
}


@dataclass(frozen=True)
class Shape:
    """Sizes of one MixtureOfExperts."""

    tokens: int
    top_k: int
    experts: int
    hidden: int
    inner: int

    @property
    def pairs(self) -> int:
        """Rows of the grouped products."""
        return self.tokens * self.top_k


def tile_for(sm: int, weight_format: WeightFormat, shape: Shape) -> Tile:
    """The tile for ``shape`` on compute capability ``sm`` (90, 120)."""
    few, many = TILES[sm, weight_format]
    # A canvas of 256 tokens over 128 experts, top 8, is 16 pairs per expert; twice that fits two tiles side by side.
    return few if shape.pairs <= 32 * shape.experts else many


def workspace(shape: Shape, weight_format: WeightFormat, tile: Tile, itemsize: int) -> dict[str, tuple[int, int]]:
    """Offset and size in bytes of each buffer that the kernels share, ``itemsize`` being that of the activations.

    With P = tokens * top_k and L = :func:`~dgcompile.plugins.moe.routing.tile_limit`: 4 (L (block_m + 1) + 1) bytes for
    the routing and P (inner + hidden) itemsize for the products; for w4a8 also T (hidden + 4) + P (inner + 4).
    """
    limit = routing.tile_limit(shape.pairs, shape.experts, tile.block_m)
    sizes = {
        "tile_pairs": 4 * limit * tile.block_m,
        "tile_expert": 4 * limit,
        "tile_count": 4,
        "inner": itemsize * shape.pairs * shape.inner,
        "outer": itemsize * shape.pairs * shape.hidden,
    }
    if weight_format == "w4a8":
        sizes |= {
            "hidden_codes": shape.tokens * shape.hidden,
            "hidden_scale": 4 * shape.tokens,
            "inner_codes": shape.pairs * shape.inner,
            "inner_scale": 4 * shape.pairs,
        }
    places, end = {}, 0
    for name, size in sizes.items():
        places[name] = (end, size)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return places


def workspace_bytes(shape: Shape, weight_format: WeightFormat, tile: Tile, itemsize: int) -> int:
    """Size of the whole :func:`workspace`."""
    offset, size = list(workspace(shape, weight_format, tile, itemsize).values())[-1]
    return offset + -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Launch:
    """One kernel call: everything that compiling it ahead of time or launching it needs.

    Attributes:
        name: of the step.
        function: the Triton function.
        arguments: run-time arguments in order: the name of a tensor or buffer, or an int.
        constants: compile-time arguments.
        grid: thread blocks.
        warps, stages: as Triton takes them.
    """

    name: str
    function: Any
    arguments: tuple[str | int, ...]
    constants: dict[str, int]
    grid: tuple[int, int, int]
    warps: int = 4
    stages: int = 1


def launches(shape: Shape, weight_format: WeightFormat, group_size: int, tile: Tile) -> list[Launch]:
    """The kernel calls of one MixtureOfExperts, in order.

    Tensors are named as in :func:`run`, buffers as in :func:`workspace`.
    """
    if weight_format in ("int4", "w4a8") and group_size not in INT4_GROUPS:
        raise ValueError(f"INT4 groups hold 32 or 64 weights, not {group_size}")
    format_code = {"float": kernel.FLOAT, "fp8": kernel.FP8}.get(weight_format, kernel.INT4).value
    limit = routing.tile_limit(shape.pairs, shape.experts, tile.block_m)
    product = {
        "HIDDEN": shape.hidden,
        "INNER": shape.inner,
        "FORMAT": format_code,
        "GROUP": group_size,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
    }
    route = {
        "EXPERTS": shape.experts,
        "EXPERT_BINS": max(16, triton.next_power_of_2(shape.experts)),
        "BLOCK_M": tile.block_m,
        "CHUNK": ROUTE_CHUNK,
    }
    table = ("tile_pairs", "tile_expert", "tile_count")
    quantized = weight_format == "w4a8"
    # Where activations are not quantized their scale is never read; the tensor stands in for the pointer.
    hidden = ("hidden_codes", "hidden_scale") if quantized else ("hidden", "hidden")
    inner = ("inner_codes", "inner_scale") if quantized else ("inner", "inner")
    gate_up_scale, down_scale = ("gate_up", "down") if weight_format == "float" else ("gate_up_scale", "down_scale")
    steps = [
        Launch("route", routing.route_kernel, ("expert_ids", *table, shape.pairs), route, (shape.experts, 1, 1)),
        Launch(
            "gate_up",
            kernel.gate_up_kernel,
            (*hidden, "gate_up", gate_up_scale, *table, "inner", shape.pairs),
            {"TOP_K": shape.top_k, **product},
            (limit, triton.cdiv(shape.inner, tile.block_n), 1),
            tile.warps,
            tile.stages,
        ),
        Launch(
            "down",
            kernel.down_kernel,
            (*inner, "down", down_scale, *table, "outer", shape.pairs),
            product,
            (limit, triton.cdiv(shape.hidden, tile.block_n), 1),
            tile.warps,
            tile.stages,
        ),
        Launch(
            "combine",
            kernel.combine_kernel,
            ("outer", "expert_weights", "output"),
            {"TOP_K": shape.top_k, "HIDDEN": shape.hidden, "BLOCK": COMBINE_BLOCK},
            (shape.tokens, triton.cdiv(shape.hidden, COMBINE_BLOCK), 1),
        ),
    ]
    if quantized:
        steps.insert(1, _round_rows("hidden", shape.tokens, shape.hidden))
        steps.insert(3, _round_rows("inner", shape.pairs, shape.inner))
    return steps


def _round_rows(name: str, rows: int, width: int) -> Launch:
    return Launch(
        f"round_{name}",
        kernel.round_rows_kernel,
        (name, f"{name}_codes", f"{name}_scale"),
        {"WIDTH": width, "BLOCK": triton.next_power_of_2(width)},
        (rows, 1, 1),
    )


def tensor_types(weight_format: WeightFormat, activations: str, int4_scales: str = "fp16") -> dict[str, str]:
    """Triton's type of each tensor and buffer, all of them aligned to 16 bytes.

    Args:
        weight_format: of the experts.
        activations: "bf16" or "fp16".
        int4_scales: type of the scales of INT4 groups.
    """
    integers = ("expert_ids", "tile_pairs", "tile_expert", "tile_count")
    codes, scales = ("hidden_codes", "inner_codes"), ("hidden_scale", "inner_scale", "expert_weights")
    weights = {"float": activations, "fp8": "fp8e4nv"}.get(weight_format, "u8")
    types = dict.fromkeys(("hidden", "inner", "outer", "output"), activations)
    types |= dict.fromkeys(integers, "i32") | dict.fromkeys(codes, "fp8e4nv") | dict.fromkeys(scales, "fp32")
    types |= dict.fromkeys(("gate_up", "down"), weights)
    types |= dict.fromkeys(("gate_up_scale", "down_scale"), "fp32" if weight_format == "fp8" else int4_scales)
    return {name: f"*{kind}:16" for name, kind in types.items()}


def compile_launch(step: Launch, types: dict[str, str], sm: int) -> CompiledKernel:
    """The cubin of one kernel call; ``types`` from :func:`tensor_types`."""
    signature = {
        name: types[argument] if isinstance(argument, str) else "i32"
        for name, argument in zip(step.function.arg_names, step.arguments, strict=False)
    }
    return compile_kernel(step.function, signature, step.constants, sm, step.warps, step.stages)


def run(
    hidden: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    tile: Tile,
    weight_format: WeightFormat = "float",
    group_size: int = 0,
    gate_up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
) -> Tensor:
    """MixtureOfExperts of contiguous torch tensors, on a GPU or in Triton's interpreter.

    Args:
        hidden: [T, H].
        expert_ids: i32 or i64 [T, K].
        expert_weights: [T, K].
        gate_up: [E, 2 I, H] in the weight format, gate rows first: bytes are uint8, E4M3 may be float8_e4m3fn too.
        down: [E, H, I] likewise.
        tile: see :func:`tile_for`.
        weight_format, group_size: see :mod:`dgcompile.plugins.moe.formats`.
        gate_up_scale, down_scale: scales of the weights, if the format has any.

    Returns:
        [T, H] in the dtype of ``hidden``.
    """
    import torch

    if weight_format == "fp8":
        gate_up, down = gate_up.view(torch.float8_e4m3fn), down.view(torch.float8_e4m3fn)
    inner = gate_up.shape[1] if weight_format in ("float", "fp8") else gate_up.shape[2]
    tokens, top_k = expert_ids.shape
    shape = Shape(tokens, top_k, gate_up.shape[0], hidden.shape[1], inner // 2)
    given = {
        "hidden": hidden,
        "expert_ids": expert_ids,
        "expert_weights": expert_weights,
        "gate_up": gate_up,
        "down": down,
        "gate_up_scale": gate_up_scale,
        "down_scale": down_scale,
    }
    tensors = {name: tensor for name, tensor in given.items() if tensor is not None}
    if loose := [name for name, tensor in tensors.items() if not tensor.is_contiguous()]:
        raise ValueError(f"tensors must be contiguous: {', '.join(loose)}")
    memory = torch.empty(
        workspace_bytes(shape, weight_format, tile, hidden.itemsize), dtype=torch.uint8, device=hidden.device
    )
    dtypes = {
        "tile_pairs": torch.int32,
        "tile_expert": torch.int32,
        "tile_count": torch.int32,
        "hidden_codes": torch.float8_e4m3fn,
        "inner_codes": torch.float8_e4m3fn,
        "hidden_scale": torch.float32,
        "inner_scale": torch.float32,
    }
    for name, (offset, size) in workspace(shape, weight_format, tile, hidden.itemsize).items():
        tensors[name] = memory[offset : offset + size].view(dtypes.get(name, hidden.dtype))
    tensors["output"] = torch.empty_like(hidden)
    for step in launches(shape, weight_format, group_size, tile):
        arguments = [tensors[argument] if isinstance(argument, str) else argument for argument in step.arguments]
        step.function[step.grid](*arguments, **step.constants, num_warps=step.warps, num_stages=step.stages)
    return tensors["output"]
