"""How the MixtureOfExperts kernels are launched: tile sizes, workspace, and the calls."""

from __future__ import annotations

from dataclasses import dataclass

from dgcompile.plugins.launch import Constant, Launch, lay_out
from dgcompile.plugins.moe.formats import FORMAT_CODES, INT4_GROUPS, WEIGHT_FORMATS, WeightFormat

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
# counts is bytes in flight with two blocks or more on a multiprocessor; SM89 and SM120 have two fifths of SM90's shared
# memory to keep loads waiting in. Limits and use are checked on the cubins; nothing here has been timed on a GPU yet.
TILES: dict[tuple[int, WeightFormat], tuple[Tile, Tile]] = {
    (89, "float"): (Tile(16, 64, 64, 4, 3), Tile(64, 64, 64, 4, 3)),
    (89, "fp8"): (Tile(16, 64, 128, 4, 3), Tile(64, 64, 64, 4, 3)),
    (89, "int4"): (Tile(16, 64, 64, 4, 4), Tile(64, 64, 64, 4, 3)),
    (89, "w4a8"): (Tile(16, 64, 64, 4, 4), Tile(64, 64, 64, 4, 3)),
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
    """The tile for ``shape`` on compute capability ``sm`` (89, 90, 120)."""
    few, many = TILES[sm, weight_format]
    # A canvas of 256 tokens over 128 experts, top 8, is 16 pairs per expert; twice that fits two tiles side by side.
    return few if shape.pairs <= 32 * shape.experts else many


def tile_limit(pairs: int, experts: int, block_m: int) -> int:
    """Most tiles of ``block_m`` rows that ``pairs`` rows can fill: every expert in use leaves one partly empty."""
    in_use = min(pairs, experts)
    return (pairs + in_use * (block_m - 1)) // block_m


def workspace(
    shape: Shape, weight_format: WeightFormat, tile: Tile, itemsize: int
) -> tuple[dict[str, tuple[int, int]], int]:
    """Offset and size of each buffer that the kernels share, and the bytes of all.

    With P = tokens * top_k, L = :func:`tile_limit` and s = ``itemsize`` of the activations: 4 (L (block_m + 1) + 1)
    bytes for the routing and P (inner + hidden) s for the products; for w4a8 also T (hidden + 4) + P (inner + 4).
    """
    limit = tile_limit(shape.pairs, shape.experts, tile.block_m)
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
    return lay_out(sizes)


def workspace_limit(largest: Shape, sm: int, weight_format: WeightFormat, itemsize: int) -> int:
    """Bytes that no call with up to ``largest.tokens`` tokens exceeds, whichever tile it takes."""
    return max(workspace(largest, weight_format, tile, itemsize)[1] for tile in TILES[sm, weight_format])


def check(shape: Shape, weight_format: str, group_size: int) -> None:
    """Refuses what the kernels do not compute.

    Raises:
        ValueError: names the size or attribute that is out of range.
    """
    if min(shape.tokens, shape.top_k, shape.experts, shape.hidden, shape.inner) < 1:
        raise ValueError(f"{shape}: expected every size to be 1 or more")
    if shape.top_k > shape.experts:
        raise ValueError(f"top_k is {shape.top_k} but there are {shape.experts} experts: expected top_k <= experts")
    if shape.pairs * max(shape.hidden, shape.inner) >= 2**31:
        raise ValueError(f"{shape}: tokens x top_k x the wider of hidden and inner must stay below 2**31")
    check_format(weight_format, group_size)


def check_format(weight_format: str, group_size: int) -> None:
    """Refuses an unknown format or group size, see :func:`check`."""
    if weight_format not in WEIGHT_FORMATS:
        raise ValueError(f"weight_format is {weight_format!r}, expected one of {', '.join(WEIGHT_FORMATS)}")
    groups = INT4_GROUPS if weight_format in ("int4", "w4a8") else (0,)
    if group_size not in groups:
        expected = " or ".join(str(group) for group in groups)
        raise ValueError(f"group_size of {weight_format} is {group_size}, expected {expected}")


def launches(
    shape: Shape,
    weight_format: WeightFormat,
    group_size: int,
    tile: Tile,
    activations: str,
    int4_scales: str = "fp16",
    ids: str = "i32",
) -> list[Launch]:
    """The kernel calls of one MixtureOfExperts, in order.

    Args:
        shape, weight_format, group_size: what is computed, see :mod:`dgcompile.plugins.moe.formats`.
        tile: see :func:`tile_for`.
        activations: Triton's name of the type of the hidden states: "bf16", "fp16" or "fp32".
        int4_scales: likewise, of the scales of INT4 groups.
        ids: likewise, of the experts' ids.

    Tensors are named as in ``torch_call.mixture_of_experts``, buffers as in :func:`workspace`.

    Raises:
        ValueError: an unknown format or group size.
    """
    check_format(weight_format, group_size)
    types = {**tensor_types(weight_format, activations, int4_scales), "expert_ids": f"*{ids}:16"}
    limit = tile_limit(shape.pairs, shape.experts, tile.block_m)

    def step(
        kernel: str,
        arguments: tuple[str | int, ...],
        constants: dict[str, Constant],
        grid: tuple[int, int, int],
        warps: int = 4,
        stages: int = 1,
    ) -> Launch:
        argument_types = tuple(types[argument] if isinstance(argument, str) else "i32" for argument in arguments)
        return Launch(f"moe.{kernel}", arguments, argument_types, constants, grid, warps, stages)

    def round_rows(name: str, rows: int, width: int) -> Launch:
        constants: dict[str, Constant] = {"WIDTH": width, "BLOCK": _power_of_2(width)}
        return step("kernel.round_rows_kernel", (name, f"{name}_codes", f"{name}_scale"), constants, (rows, 1, 1))

    product: dict[str, Constant] = {
        "HIDDEN": shape.hidden,
        "INNER": shape.inner,
        "FORMAT": FORMAT_CODES[weight_format],
        "GROUP": group_size,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
    }
    table = ("tile_pairs", "tile_expert", "tile_count")
    quantized = weight_format == "w4a8"
    # Where activations are not quantized their scale is never read; the tensor stands in for the pointer.
    hidden = ("hidden_codes", "hidden_scale") if quantized else ("hidden", "hidden")
    inner = ("inner_codes", "inner_scale") if quantized else ("inner", "inner")
    gate_up_scale, down_scale = ("gate_up", "down") if weight_format == "float" else ("gate_up_scale", "down_scale")
    steps = [
        step(
            "routing.route_kernel",
            ("expert_ids", *table, shape.pairs),
            {
                "EXPERTS": shape.experts,
                "EXPERT_BINS": max(16, _power_of_2(shape.experts)),
                "BLOCK_M": tile.block_m,
                "CHUNK": ROUTE_CHUNK,
            },
            (shape.experts, 1, 1),
        ),
        step(
            "kernel.gate_up_kernel",
            (*hidden, "gate_up", gate_up_scale, *table, "inner", shape.pairs),
            {"TOP_K": shape.top_k, **product},
            (limit, -(-shape.inner // tile.block_n), 1),
            tile.warps,
            tile.stages,
        ),
        step(
            "kernel.down_kernel",
            (*inner, "down", down_scale, *table, "outer", shape.pairs),
            product,
            (limit, -(-shape.hidden // tile.block_n), 1),
            tile.warps,
            tile.stages,
        ),
        step(
            "kernel.combine_kernel",
            ("outer", "expert_weights", "output"),
            {"TOP_K": shape.top_k, "HIDDEN": shape.hidden, "BLOCK": COMBINE_BLOCK},
            (shape.tokens, -(-shape.hidden // COMBINE_BLOCK), 1),
        ),
    ]
    if quantized:
        steps.insert(1, round_rows("hidden", shape.tokens, shape.hidden))
        steps.insert(3, round_rows("inner", shape.pairs, shape.inner))
    return steps


def _power_of_2(number: int) -> int:
    """The smallest power of two that is not below ``number``."""
    return 1 << (number - 1).bit_length()


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
