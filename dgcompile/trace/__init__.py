"""PyTorch -> ONNX: the transformers model becomes the encoder and the denoiser graph."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dgcompile.contract import GRAPH_FILES, GraphName
from dgcompile.model_spec import ModelSpec
from dgcompile.progress import Progress
from dgcompile.recipe import ActivationDType

if TYPE_CHECKING:
    from dgcompile.safetensors_file import StoredTensor


def trace_graphs(
    config: Mapping[str, Any],
    spec: ModelSpec,
    store: Mapping[str, StoredTensor],
    dtype: ActivationDType,
    folder: Path,
    progress: Progress | None = None,
) -> None:
    """Writes ``encoder.onnx`` and ``denoiser.onnx`` into ``folder``; needs the model's shape, not its weights.

    Args:
        config: the parsed ``config.json``.
        spec: the same as a ModelSpec.
        store: where each tensor lies in ``weights.safetensors`` (see :func:`dgcompile.weights_store.plan_store`).
        dtype: of activations, KV cache and self-conditioning.
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

    with (progress or Progress()).task("trace", total=5) as advance:
        check_transformers()
        model, fake = weightless_model(config, dtype)
        swap_modules(model)
        advance()
        modules: dict[GraphName, EncoderGraph | DenoiserGraph] = {
            "encoder": EncoderGraph(model),
            "denoiser": DenoiserGraph(model),
        }
        for graph, module in modules.items():
            program = export_program(graph, module, spec, dtype, fake)
            advance()
            write_onnx(to_onnx(graph, program, spec, dtype, store), folder / GRAPH_FILES[graph])
            advance()
