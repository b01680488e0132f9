"""Finds the tiles of the kernels for one GPU: candidates are pruned by what they compile to, the rest is timed.

Prints the lines for ``TILES`` in plugins/block_attention/tiles.py and plugins/moe/launch.py, best first in the JSON.
Without a GPU, ``--model-only`` ranks the candidates by a model of occupancy alone.

    python scripts/retune_tiles.py --sm 90 --head-dim 256 --head-dim 512 --output tiles.json
    python scripts/retune_tiles.py --sm 120 --format int4 --model-only
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import click

from dgcompile.files import write_atomically
from dgcompile.plugins.block_attention import launch as attention
from dgcompile.plugins.block_attention import tiles as attention_tiles
from dgcompile.plugins.launch import SHARED_MEMORY_LIMIT, Launch
from dgcompile.plugins.moe import launch as moe
from dgcompile.plugins.moe.formats import INT4_BLOCK, WEIGHT_FORMATS, WeightFormat

AnyTile = attention_tiles.Tile | moe.Tile

REGISTERS_FOR_SUMS = 200
"""Of a thread's 255: candidates whose fp32 sums alone need more would spill."""


@dataclass(frozen=True)
class Compiled:
    """What a candidate's main kernels come to: the largest of them counts."""

    registers: int
    shared_bytes: int
    spilled_bytes: int
    blocks: int


@dataclass(frozen=True)
class Result:
    """A candidate that fits. ``score`` ranks where nothing was timed and ``milliseconds`` is None: larger is better."""

    tile: AnyTile
    compiled: Compiled
    score: float
    milliseconds: float | None


class Case(Protocol):
    """One entry of a table."""

    @property
    def name(self) -> str:
        """Key of the entry, in Python."""

    def candidates(self, sm: int) -> Iterator[AnyTile]:
        """Tiles that could fit."""

    def kernels(self, tile: AnyTile) -> list[Launch]:
        """The launches whose kernels take the time."""

    def score(self, tile: AnyTile, blocks: int) -> float:
        """The model's opinion of a tile with that many blocks on a multiprocessor: larger is better."""

    def milliseconds(self, tile: AnyTile, sm: int) -> float:
        """Time of one call on this machine's GPU."""


@dataclass(frozen=True)
class AttentionCase:
    """One canvas over a full cache, in the geometry of the published model (512: its full-attention layers)."""

    head_dim: int

    @property
    def name(self) -> str:
        return f"{self.head_dim}"

    @property
    def shape(self) -> attention.Shape:
        kv_heads, capacity = (2, 8192) if self.head_dim == 512 else (8, 1024)
        return attention.Shape(1, 256, 16, kv_heads, self.head_dim, capacity)

    @property
    def mode(self) -> attention.Mode:
        return attention.Mode(1.0, 0 if self.head_dim == 512 else 1024, causal=False)

    def candidates(self, sm: int) -> Iterator[attention_tiles.Tile]:
        for block_m, block_n, warps, stages in itertools.product(
            (16, 32, 64, 128), (16, 32, 64, 128), (4, 8), (2, 3, 4)
        ):
            tile = attention_tiles.Tile(block_m, block_n, warps, stages)
            fits = attention_tiles.shared_memory_bytes(sm, self.head_dim, tile) <= SHARED_MEMORY_LIMIT[sm]
            if fits and block_m * (self.head_dim + block_n) <= REGISTERS_FOR_SUMS * 32 * warps:
                yield tile

    def kernels(self, tile: AnyTile) -> list[Launch]:
        assert isinstance(tile, attention_tiles.Tile)
        return attention.launches(self.shape, self.mode, "bf16", tile, 1)

    def score(self, tile: AnyTile, blocks: int) -> float:
        # Query rows that share a read of the keys; among equals the tile that keeps more keys on their way.
        assert isinstance(tile, attention_tiles.Tile)
        return tile.block_m * blocks + tile.block_n * tile.num_stages * blocks / 1e4

    def milliseconds(self, tile: AnyTile, sm: int) -> float:
        import torch

        from dgcompile.plugins.block_attention.torch_call import block_attention

        assert isinstance(tile, attention_tiles.Tile)
        shape, mode = self.shape, self.mode
        multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count

        def normal(tokens: int, heads: int) -> torch.Tensor:
            return torch.randn(shape.batch, tokens, heads, shape.head_dim, dtype=torch.bfloat16, device="cuda")

        query, key, value = (normal(shape.tokens, heads) for heads in (shape.heads, shape.kv_heads, shape.kv_heads))
        past_key, past_value = (normal(shape.capacity, shape.kv_heads) for _ in range(2))
        length = torch.full((shape.batch,), shape.capacity, dtype=torch.int32, device="cuda")
        splits = attention.choose_splits(shape, sm, tile, multiprocessors)
        return _bench(
            lambda: block_attention(
                query, key, value, past_key, past_value, length, **asdict(mode), tile=tile, splits=splits
            )
        )


@dataclass(frozen=True)
class ExpertsCase:
    """The published model's experts in one format, with few pairs for each expert (a canvas) or many (a batch)."""

    weight_format: WeightFormat
    many: bool

    @property
    def name(self) -> str:
        return f'"{self.weight_format}", {"many" if self.many else "few"}'

    @property
    def group_size(self) -> int:
        return 32 if self.weight_format in ("int4", "w4a8") else 0

    @property
    def shape(self) -> moe.Shape:
        return moe.Shape(2048 if self.many else 256, 8, 128, 2816, 704)

    def candidates(self, sm: int) -> Iterator[moe.Tile]:
        packed = self.weight_format in ("int4", "w4a8")
        steps = (INT4_BLOCK,) if packed else (32, 64, 128)
        heights = (32, 64, 128) if self.many else (16, 32)
        itemsize = {"float": 2.0, "fp8": 1.0}.get(self.weight_format, 0.5)
        for block_m, block_n, block_k, warps, stages in itertools.product(
            heights, (32, 64, 128), steps, (4, 8), (2, 3, 4, 5)
        ):
            # The weights of gate and up, and the activations, wait in shared memory in each stage.
            waiting = stages * block_k * (2 * block_n * itemsize + 2 * block_m)
            if waiting <= SHARED_MEMORY_LIMIT[sm] and 2 * block_m * block_n <= REGISTERS_FOR_SUMS * 32 * warps:
                yield moe.Tile(block_m, block_n, block_k, warps, stages)

    def kernels(self, tile: AnyTile) -> list[Launch]:
        assert isinstance(tile, moe.Tile)
        steps = moe.launches(self.shape, self.weight_format, self.group_size, tile, "bf16")
        return [step for step in steps if step.function in ("gate_up_kernel", "down_kernel")]

    def score(self, tile: AnyTile, blocks: int) -> float:
        # Weights on their way into a multiprocessor; with many pairs, those that share a read of the weights first.
        assert isinstance(tile, moe.Tile)
        on_the_way = blocks * (tile.stages - 1) * tile.block_n * tile.block_k
        # One block cannot compute while it waits.
        return on_the_way * (tile.block_m if self.many else 1) * min(blocks, 2)

    def milliseconds(self, tile: AnyTile, sm: int) -> float:
        import torch

        from dgcompile.plugins.moe.torch_call import mixture_of_experts

        assert isinstance(tile, moe.Tile)
        shape, generator = self.shape, torch.Generator("cuda").manual_seed(0)

        def uniform(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.rand(size, device="cuda", generator=generator).to(dtype)

        scales: dict[str, torch.Tensor] = {}
        weights: dict[str, torch.Tensor] = {}
        for name, rows, places in (("gate_up", 2 * shape.inner, shape.hidden), ("down", shape.hidden, shape.inner)):
            if self.weight_format == "float":
                weights[name] = uniform(shape.experts, rows, places, dtype=torch.bfloat16)
                continue
            size = [shape.experts, rows, places]
            scale = uniform(shape.experts, rows)
            if self.group_size:
                size = [shape.experts, -(-places // INT4_BLOCK), rows, INT4_BLOCK // 2]
                scale = uniform(shape.experts, -(-places // self.group_size), rows, dtype=torch.float16)
            # Codes without a NaN among them.
            weights[name] = torch.randint(0, 112, size, dtype=torch.uint8, device="cuda", generator=generator)
            scales[f"{name}_scale"] = scale
        hidden = uniform(shape.tokens, shape.hidden, dtype=torch.bfloat16)
        logits = uniform(shape.tokens, shape.experts)
        routing = logits.topk(shape.top_k)
        return _bench(
            lambda: mixture_of_experts(
                hidden,
                routing.indices.to(torch.int32),
                routing.values,
                weights["gate_up"],
                weights["down"],
                tile=tile,
                weight_format=self.weight_format,
                group_size=self.group_size,
                **scales,
            )
        )


def _bench(call: Any) -> float:
    from triton.testing import do_bench

    return float(do_bench(call, warmup=20, rep=100, return_mode="median"))


def compile_candidate(kernels: list[Launch], sm: int) -> Compiled | str:
    """What the kernels come to, or why they do not compile. Runs in a process of its own."""
    from dgcompile.plugins.compile import compile_launch

    try:
        compiled = [compile_launch(kernel, sm) for kernel in kernels]
    except Exception as problem:  # the compiler has many kinds; a candidate that fails is just no candidate
        return f"{type(problem).__name__}: {problem}"
    return Compiled(
        registers=max(kernel.registers for kernel in compiled),
        shared_bytes=max(kernel.shared_bytes for kernel in compiled),
        spilled_bytes=max(kernel.spilled_bytes for kernel in compiled),
        blocks=min(kernel.blocks_per_sm for kernel in compiled),
    )


def rank(case: Case, sm: int, *, timed: bool, limit: int | None, workers: int) -> list[Result]:
    """The candidates of a case that fit, best first.

    Args:
        case: entry of a table.
        sm: compute capability.
        timed: whether to time them on this machine's GPU.
        limit: candidates to compile at most, those that the model likes best with one block on a multiprocessor.
        workers: processes that compile.
    """
    tiles = sorted(case.candidates(sm), key=lambda tile: case.score(tile, 1), reverse=True)[:limit]
    results = []
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        waiting = [(tile, pool.submit(compile_candidate, case.kernels(tile), sm)) for tile in tiles]
        for tile, future in waiting:
            compiled = future.result()
            if isinstance(compiled, str) or compiled.spilled_bytes or not compiled.blocks:
                continue
            milliseconds = case.milliseconds(tile, sm) if timed else None
            results.append(Result(tile, compiled, case.score(tile, compiled.blocks), milliseconds))
            time = "" if milliseconds is None else f"{milliseconds:.4f} ms  "
            click.echo(
                f"{case.name}: {time}{tile} {compiled.registers} registers, {compiled.shared_bytes} bytes shared, "
                f"{compiled.blocks} blocks",
                err=True,
            )
    return sorted(results, key=lambda found: -found.score if found.milliseconds is None else found.milliseconds)


def _tile_source(tile: AnyTile) -> str:
    return f"Tile({', '.join(str(value) for value in asdict(tile).values())})"


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.option("--sm", type=click.Choice(["90", "120"]), required=True, help="Compute capability.")
@click.option("--head-dim", "head_dims", multiple=True, type=int, help="BlockAttention widths.")
@click.option("--format", "formats", multiple=True, type=click.Choice(WEIGHT_FORMATS), help="MixtureOfExperts formats.")
@click.option("--limit", type=click.IntRange(1), help="Candidates compiled for each entry at most.")
@click.option("--model-only", is_flag=True, help="Time nothing: rank by the model of occupancy. Needs no GPU.")
@click.option("--workers", default=len(os.sched_getaffinity(0)), type=click.IntRange(1), help="Compiling processes.")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="JSON file for all results.")
def main(
    sm: str,
    head_dims: tuple[int, ...],
    formats: tuple[WeightFormat, ...],
    limit: int | None,
    model_only: bool,
    workers: int,
    output: Path | None,
) -> None:
    """Rank tile candidates for one GPU and print the table's lines. All widths and formats unless some are named."""
    capability = int(sm)
    if not model_only:
        import torch

        from dgcompile.plugins.torch_launch import compute_capability

        if not torch.cuda.is_available():
            raise click.ClickException("there is no GPU to time on; pass --model-only to rank by the model alone")
        found = compute_capability(torch.device("cuda"))
        if found != capability:
            raise click.ClickException(f"this machine's GPU uses the tiles of SM {found}, not {sm}")
    if not head_dims and not formats:
        head_dims, formats = tuple(attention_tiles.TILES[capability]), WEIGHT_FORMATS
    cases: list[Case] = [AttentionCase(head_dim) for head_dim in head_dims]
    cases += [ExpertsCase(weight_format, many) for weight_format in formats for many in (False, True)]

    report: dict[str, list[dict[str, Any]]] = {}
    best: dict[str, str] = {}
    for case in cases:
        results = rank(case, capability, timed=not model_only, limit=limit, workers=workers)
        report[case.name] = [asdict(result) for result in results]
        best[case.name] = _tile_source(results[0].tile) if results else "None"
    lines = [f"{case.name}: {best[case.name]}," for case in cases if isinstance(case, AttentionCase)]
    for weight_format in formats:
        few, many = (best[ExpertsCase(weight_format, many).name] for many in (False, True))
        lines.append(f'({sm}, "{weight_format}"): ({few}, {many}),')
    how = "ranked by the model alone, nothing timed" if model_only else "timed"
    click.echo(f"# SM {sm}, {how}")
    click.echo("\n".join(lines))
    if output is not None:
        write_atomically(
            output, (json.dumps({"sm": capability, "timed": not model_only, "tiles": report}, indent=1) + "\n").encode()
        )


if __name__ == "__main__":
    main()
