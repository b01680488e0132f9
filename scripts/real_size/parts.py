"""The pieces of a build that have no command of their own, each run in a process of its own to be measured.

    python scripts/real_size/parts.py trace CHECKPOINT FOLDER --target rtx5090 --recipe int4

Each writes one JSON object to stdout.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dgcompile.checkpoint import Checkpoint
from dgcompile.recipe import Recipe
from dgcompile.target import Target

PHASES = {
    "reading": r"readinto",
    "checking for NaN": r"isfinite|'all' of",
    "rounding": r"^encode$",
    "hashing": r"'update' of",
    "writing": r"'write' of",
    "waiting for the disk": r"fsync",
}
"""What the time of a conversion goes to: functions that do it, none of which calls another one of them."""


def trace(checkpoint: Checkpoint, recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Traces both graphs: seconds, nodes of the project's operators, largest constant in the files (bytes)."""
    from dgcompile.contract import GRAPH_FILES
    from dgcompile.trace import trace_graphs

    started = time.monotonic()
    trace_graphs(checkpoint.config, checkpoint.spec, recipe, folder)
    seconds = time.monotonic() - started
    graphs = {graph: _graph_facts(folder / file) for graph, file in GRAPH_FILES.items()}
    return {"seconds": round(seconds, 1), "graphs": graphs}


def _graph_facts(file: Path) -> dict[str, Any]:
    import onnx

    from dgcompile.contract import ONNX_DOMAIN

    model = onnx.load(file, load_external_data=False)
    nodes = Counter(node.op_type for node in model.graph.node if node.domain == ONNX_DOMAIN)
    return {
        "file_bytes": file.stat().st_size,
        "nodes": len(model.graph.node),
        "operators": dict(sorted(nodes.items())),
        "largest_constant_bytes": max((tensor.ByteSize() for tensor in _constants(model)), default=0),
    }


def _constants(model: Any) -> Iterator[Any]:
    """The tensors whose values are in the file itself: initializers and attributes, in functions and subgraphs too."""
    import onnx

    bodies: list[Any] = [model.graph, *model.functions]
    for body in bodies:
        for tensor in getattr(body, "initializer", ()):
            if tensor.data_location != onnx.TensorProto.EXTERNAL:
                yield tensor
        for node in body.node:
            for attribute in node.attribute:
                yield from ([attribute.t] if attribute.HasField("t") else [])
                yield from attribute.tensors
                bodies.extend([attribute.g] if attribute.HasField("g") else [])
                bodies.extend(attribute.graphs)


def quantize(checkpoint: Checkpoint, recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Writes the weights store: seconds, and what they went to."""
    from dgcompile.quantize.convert import convert_weights

    profile = cProfile.Profile()
    started = time.monotonic()
    converted = profile.runcall(convert_weights, checkpoint, recipe, folder)
    seconds = time.monotonic() - started
    # Rows are (calls, of them not recursive, own seconds, seconds with callees, callers) by (file, line, function).
    rows = pstats.Stats(profile).stats.items()  # type: ignore[attr-defined]
    phases = {
        phase: sum(row[3] for (_, _, function), row in rows if re.search(functions, function))
        for phase, functions in PHASES.items()
    }
    phases["other"] = seconds - sum(phases.values())
    return {
        "seconds": round(seconds, 2),
        "source_bytes": sum(tensor.nbytes for tensor in checkpoint.stored.values()),
        "store_bytes": converted.nbytes,
        "phases_seconds": {phase: round(spent, 2) for phase, spent in phases.items()},
    }


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["trace", "quantize"])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("folder", type=Path, help="exists")
    parser.add_argument("--target", required=True)
    parser.add_argument("--recipe", required=True)
    given = parser.parse_args()
    recipe = Recipe.load(given.recipe).for_target(Target.load(given.target))
    checkpoint = Checkpoint.open(given.checkpoint)
    recipe.check_model(checkpoint.spec)
    run = {"trace": trace, "quantize": quantize}[given.part]
    print(json.dumps(run(checkpoint, recipe, given.folder)))


if __name__ == "__main__":
    main()
