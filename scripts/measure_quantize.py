"""Time and memory of quantizing one layer's experts of the published size: [128, 1408, 2816] and [128, 2816, 704].

    python scripts/measure_quantize.py [--format int4] [--group-size 32]

The weights are random, in bfloat16. Peak memory is that of the process, the source tensor included.
"""

import resource
import time

import click
import torch

from dgcompile.quantize.formats import FORMATS

SHAPES = {"gate_up_proj": (128, 1408, 2816), "down_proj": (128, 2816, 704)}


@click.command(help=__doc__)
@click.option("--format", "name", type=click.Choice(["fp8", "int4"]), default="int4", show_default=True)
@click.option("--group-size", type=int, default=32, show_default=True, help="for int4")
def main(name: str, group_size: int) -> None:
    before, total = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, 0.0
    for tensor, shape in SHAPES.items():
        weight = torch.randn(shape, dtype=torch.bfloat16)
        started = time.monotonic()
        parts = FORMATS[name].encode(weight, group_size if name == "int4" else 0, "BF16")
        seconds = time.monotonic() - started
        total += seconds
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
        stored = sum(part.nbytes for part in parts.values())
        click.echo(
            f"{tensor}: {seconds:.1f} s, {weight.nbytes / 1e9:.2f} GB to {stored / 1e9:.2f} GB, "
            f"peak so far {peak / 1e9:.2f} GB"
        )
        del weight, parts
    click.echo(f"both: {total:.1f} s on {torch.get_num_threads()} threads")


if __name__ == "__main__":
    main()
