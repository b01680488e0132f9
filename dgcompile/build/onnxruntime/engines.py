"""The traced graphs rewritten for ONNX Runtime's CPU provider: what a bundle of the cpu target runs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from dgcompile.build.onnxruntime.attention import write_attention
from dgcompile.build.onnxruntime.dense import cast_after_gather, scale_after_products
from dgcompile.build.onnxruntime.experts import write_experts
from dgcompile.build.onnxruntime.norms import fuse_norms
from dgcompile.build.onnxruntime.rotary import fuse_rotary
from dgcompile.build.onnxruntime.sampling import stream_sampler
from dgcompile.build.onnxruntime.writer import MICROSOFT
from dgcompile.contract import GRAPH_FILES, ONNX_DOMAIN, GraphName
from dgcompile.engine_table import graph_engine_file
from dgcompile.errors import TraceError
from dgcompile.files import write_atomically
from dgcompile.progress import Progress

ENGINE_FILES = tuple(graph_engine_file(graph) for graph in GRAPH_FILES)
"""The stage's files."""


def write_engines(folder: Path, progress: Progress) -> None:
    """Writes the engine of each traced graph; weights stay in the store, which the engines point to.

    Args:
        folder: the bundle's folder, with its traced graphs.
        progress: told about the two graphs.

    Raises:
        TraceError: a graph is not one that :mod:`dgcompile.trace` makes.
    """
    with progress.task("rewrite graphs", len(GRAPH_FILES), "graphs") as advance:
        for graph, file in GRAPH_FILES.items():
            model = ir.load(folder / file)
            rewrite(graph, model)
            path = folder / graph_engine_file(graph)
            path.parent.mkdir(exist_ok=True)
            write_atomically(path, ir.to_proto(model).SerializeToString(deterministic=True))
            advance()


def rewrite(graph: GraphName, model: ir.Model) -> None:
    """Rewrites a traced graph in place.

    Args:
        graph: which one it is.
        model: its weights may be anywhere; they are not read.

    Raises:
        TraceError: a custom operator is left over.
    """
    main = model.graph
    fuse_norms(main)
    fuse_rotary(main)
    scale_after_products(main)
    cast_after_gather(main)
    write_attention(main)
    write_experts(main)
    if graph == "denoiser":
        stream_sampler(main)
    RemoveUnusedNodesPass()(model)
    left = Counter(node.op_type for node in main if node.domain == ONNX_DOMAIN)
    if left:
        raise TraceError(f"{GRAPH_FILES[graph]}: nothing replaced its {', '.join(sorted(left))} nodes")
    model.functions.clear()
    del model.opset_imports[ONNX_DOMAIN]
    model.opset_imports[MICROSOFT] = 1
