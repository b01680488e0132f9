"""PyTorch -> ONNX: the transformers model becomes the encoder and the denoiser graph."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dgcompile.contract import GRAPH_FILES, GraphName
from dgcompile.model_spec import ModelSpec
from dgcompile.progress import Progress
from dgcompile.recipe import Recipe
from dgcompile.weights_store import lay_out_store


def trace_graphs(
    config: Mapping[str, Any],
    spec: ModelSpec,
    recipe: Recipe,
    folder: Path,
    progress: Progress | None = None,
) -> None:
    """Writes ``encoder.onnx`` and ``denoiser.onnx`` into ``folder``; needs the model's shape, not its weights.

    The time it takes does not depend on the model's width, and hardly on its depth: see :mod:`dgcompile.trace.repeat`.

    Args:
        config: the parsed ``config.json``.
        spec: the same as a ModelSpec.
        recipe: the formats of the weights and the dtype of the activations, for a target.
        folder: the bundle.
        progress: told of each half-step.

    Raises:
        TraceError: this transformers is not the one dgcompile was written against, or the graph came out otherwise
            than the contract says.
    """
    # torch and transformers take seconds to import: only who traces pays.
    from dgcompile.trace.export import export_program, to_onnx, write_onnx
    from dgcompile.trace.model import weightless_model
    from dgcompile.trace.modules import DenoiserGraph, EncoderGraph, check_transformers, swap_modules
    from dgcompile.trace.repeat import repeat_layers, representative_layers, shallow_config

    dtype, (weight_format, group_size) = recipe.computes_in, recipe.expert_format
    layers = representative_layers(spec)
    shallow = spec.model_copy(update={"layers": tuple(spec.layers[number] for number in layers)})
    store, shallow_store = lay_out_store(spec, recipe), lay_out_store(shallow, recipe)
    with (progress or Progress()).task("trace", total=5) as advance:
        check_transformers()
        model, fake = weightless_model(shallow_config(config, layers), dtype)
        swap_modules(model, weight_format, group_size)
        advance()
        modules: dict[GraphName, EncoderGraph | DenoiserGraph] = {
            "encoder": EncoderGraph(model),
            "denoiser": DenoiserGraph(model),
        }
        for graph, module in modules.items():
            program = export_program(graph, module, shallow, dtype, fake)
            advance()
            traced = to_onnx(graph, program, shallow, dtype, shallow_store, weight_format)
            repeat_layers(graph, traced, layers, spec, dtype, store)
            write_onnx(traced, folder / GRAPH_FILES[graph])
            advance()
