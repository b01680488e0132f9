"""Whole engines of the cpu target: what is in them, and that they compute what the traced graphs say."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from dgcompile.build.onnxruntime.engines import rewrite, write_engines
from dgcompile.bundle import WEIGHTS_FILE
from dgcompile.contract import GRAPH_FILES, GraphName
from dgcompile.engine_table import graph_engine_file
from dgcompile.errors import TraceError
from dgcompile.evaluate.graphs import GraphSession, open_graphs
from dgcompile.progress import Progress
from dgcompile.runtime.loop import StepEvent, generate
from dgcompile.runtime.pipeline import Pipeline
from dgcompile.trace.weights import INLINE_LIMIT


@pytest.mark.parametrize("graph", GRAPH_FILES)
def test_nothing_is_left_that_a_pass_replaces(bundle: Path, graph: GraphName) -> None:
    model = onnx.load(bundle / graph_engine_file(graph), load_external_data=False)
    kinds = Counter(node.op_type for node in model.graph.node)
    layers = Pipeline.open(bundle).bundle.spec.num_hidden_layers
    assert not model.functions
    assert {node.domain for node in model.graph.node} <= {"", "com.microsoft"}
    # The encoder's last layer ends in its keys and values: no query there.
    assert kinds["RotaryEmbedding"] == 2 * layers - (graph == "encoder")
    assert kinds["SimplifiedLayerNormalization"] >= 8 * (layers - 1)
    # Norms and rotations in pieces, whole-vocabulary tensors.
    assert not kinds.keys() & {"Pow", "Neg", "ReduceMean"}
    assert kinds["Scan"] == (graph == "denoiser")


@pytest.mark.parametrize("graph", GRAPH_FILES)
def test_weights_stay_in_the_store(bundle: Path, graph: GraphName) -> None:
    model = onnx.load(bundle / graph_engine_file(graph), load_external_data=False)
    size = (bundle / WEIGHTS_FILE).stat().st_size
    for tensor in model.graph.initializer:
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            assert tensor.ByteSize() <= INLINE_LIMIT, tensor.name
            continue
        place = {entry.key: entry.value for entry in tensor.external_data}
        assert place["location"] == WEIGHTS_FILE
        assert int(place["offset"]) > 0 and int(place["offset"]) + int(place["length"]) <= size


def test_engines_generate_what_the_traced_graphs_do(bundle: Path) -> None:
    """Rows of different lengths, several canvases: every number of every step is compared."""
    opened = Pipeline.open(bundle)
    vocab, length = opened.bundle.spec.vocab_size, opened.bundle.spec.canvas_length
    config = opened.bundle.generation.replace(max_new_tokens=2 * length, max_denoising_steps=5)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(vocab, size=count).tolist() for count in (1, 30, 7)]
    runs: list[list[StepEvent]] = []
    for session in (opened.session, GraphSession(open_graphs(bundle))):
        events: list[StepEvent] = []
        generate(session, prompts, config, (3, 4, 5), events.append)
        runs.append(events)
    assert len(runs[0]) == len(runs[1]) > 5
    for engine, traced in zip(*runs, strict=True):
        np.testing.assert_array_equal(engine.argmax_ids, traced.argmax_ids)
        np.testing.assert_array_equal(engine.next_canvas_ids, traced.next_canvas_ids)
        # float32 in both; steps pass rounding on to one another through the self-conditioning.
        np.testing.assert_allclose(engine.entropy, traced.entropy, atol=1e-4)


def test_equal_graphs_give_equal_engines(bundle: Path, tmp_path: Path) -> None:
    for file in GRAPH_FILES.values():
        (tmp_path / file).write_bytes((bundle / file).read_bytes())
    write_engines(tmp_path, Progress())
    for graph in GRAPH_FILES:
        name = graph_engine_file(graph)
        assert (tmp_path / name).read_bytes() == (bundle / name).read_bytes()


def test_a_denoiser_without_its_sampler_is_refused(bundle: Path) -> None:
    model = ir.load(bundle / GRAPH_FILES["denoiser"])
    (tanh,) = (node for node in model.graph if node.op_type == "Tanh")
    tanh.replace_input_with(0, model.graph.inputs[0])
    with pytest.raises(TraceError, match="does not end in softcapped logits"):
        rewrite("denoiser", model)
