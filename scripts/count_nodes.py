"""Counts the ONNX nodes of a bundle's denoiser, layer by layer: traced, traced with its functions inlined (what ONNX
Runtime would run), and rewritten as the engine of the cpu target.

    python scripts/count_nodes.py BUNDLE
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import click
import onnx
from onnx import inliner
from rich.console import Console
from rich.table import Table

from dgcompile.bundle import Manifest
from dgcompile.contract import GRAPH_FILES
from dgcompile.engine_table import graph_engine_file

CHAINS = ("Cast", "Transpose", "Reshape", "Expand", "Where", "Slice", "Concat")
"""Kinds of node that compute nothing."""


def count(model: onnx.ModelProto, layers: int) -> dict[str, object]:
    """Nodes of each layer (between the hidden states before and after it), of the rest, and of the kinds that compute
    nothing. Those of a loop's body count once."""
    ends = {f"hidden_states.{layer}": layer for layer in range(layers)}
    by_layer: Counter[int] = Counter()
    layer = 0
    kinds: Counter[str] = Counter()
    for node in model.graph.node:
        inner = sum(len(attribute.g.node) for attribute in node.attribute)
        by_layer[layer] += 1 + inner
        kinds[node.op_type] += 1
        for output in node.output:
            if output in ends:
                layer = ends[output] + 1
    return {
        "nodes": sum(by_layer.values()),
        "layers": [by_layer[number] for number in range(layers)],
        "after the last layer": by_layer[layers],
        "kinds": {kind: kinds[kind] for kind in CHAINS},
    }


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(bundle: Path, as_json: bool) -> None:
    """Nodes of the denoiser of BUNDLE, a bundle of the cpu target."""
    layers = Manifest.read(bundle).spec.num_hidden_layers
    traced = onnx.load(str(bundle / GRAPH_FILES["denoiser"]), load_external_data=False)
    engine = onnx.load(str(bundle / graph_engine_file("denoiser")), load_external_data=False)
    found = {
        "traced": count(traced, layers),
        "functions inlined": count(inliner.inline_local_functions(traced), layers),
        "engine": count(engine, layers),
    }
    if as_json:
        click.echo(json.dumps(found))
        return
    table = Table(title="nodes of the denoiser", caption="The first layer's include the embedding's and the masks'.")
    for name in ("graph", "all", "layers", "after them", *CHAINS):
        table.add_column(name)
    for name, row in found.items():
        kinds = row["kinds"]
        assert isinstance(kinds, dict)
        numbers = ", ".join(map(str, row["layers"]))  # type: ignore[call-overload]
        table.add_row(name, str(row["nodes"]), numbers, str(row["after the last layer"]), *map(str, kinds.values()))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
