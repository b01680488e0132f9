"""Parameters, and where weights lie: against the published figures and against graphs that were traced."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import onnx
import pytest

from dgcompile.build.tensorrt.graph import engine_graph
from dgcompile.bundle import Manifest
from dgcompile.contract import GRAPH_FILES, GraphName
from dgcompile.model_spec import ModelSpec
from dgcompile.plan.weights import bytes_of, is_engine_input, is_in_graph, parameters_of, weights_in_engines
from dgcompile.recipe import Recipe, weight_of
from dgcompile.runtime.device import aligned
from dgcompile.weights_store import lay_out_store
from tests.plan.helpers import recipe_of, workload


class Traced(NamedTuple):
    """A folder with graphs, and what they are graphs of."""

    folder: Path
    spec: ModelSpec
    recipe: Recipe


def test_parameters_of_the_published_model(published: ModelSpec) -> None:
    counts = parameters_of(published)
    assert sum(counts.values()) == pytest.approx(25.25e9, abs=0.01e9)
    assert counts["experts"] == pytest.approx(22.84e9, abs=0.01e9)
    assert counts["embedding"] == pytest.approx(0.74e9, abs=0.01e9)
    assert counts["attention"] + counts["dense_mlp"] == pytest.approx(1.65e9, abs=0.01e9)


def test_bytes_of_the_classes_are_all_of_the_store(published: ModelSpec) -> None:
    store = lay_out_store(published, workload(published, "h100", "int4", 8192).recipe)
    assert sum(bytes_of(store).values()) == sum(tensor.nbytes for tensor in store.tensors.values())
    assert bytes_of(store)["experts"] == pytest.approx(22.84e9 * 4.25 / 8, rel=1e-3)


@pytest.fixture(scope="module")
def traced(bundle: Path) -> Traced:
    """Both graphs of a tiny model, in float32: the builder's rewriting takes that too."""
    manifest = Manifest.read(bundle)
    return Traced(bundle, manifest.spec, manifest.recipe)


@pytest.mark.parametrize("graph", GRAPH_FILES)
def test_a_graph_has_the_weights_that_the_plan_counts(traced: Traced, graph: GraphName) -> None:
    stored = lay_out_store(traced.spec, traced.recipe).tensors
    model = onnx.load(str(traced.folder / GRAPH_FILES[graph]), load_external_data=False)
    used = {tensor.name for tensor in model.graph.initializer} & set(stored)
    planned = {name for name in stored if is_in_graph(weight_of(name), graph, traced.spec)}
    if graph == "encoder":  # experts are bound whichever engine uses them
        last = f"model.decoder.layers.{traced.spec.num_hidden_layers - 1}.experts."
        planned = {name for name in planned if not name.startswith(last)}
    assert used == planned


def test_engines_are_given_what_the_plan_counts_once(traced: Traced) -> None:
    store = lay_out_store(traced.spec, traced.recipe)
    planned = weights_in_engines(traced.spec, traced.recipe, store)
    bound: dict[str, int] = {}
    for graph, file in GRAPH_FILES.items():
        model, lifted = engine_graph(traced.folder / file)
        for tensor in lifted.values():
            assert all(is_engine_input(part, traced.recipe) for part in tensor.parts)
            bound[tensor.name] = sum(store.tensors[part].nbytes for part in tensor.parts)
        kept = {tensor.name for tensor in model.graph.initializer} & set(store.tensors)
        assert not any(is_engine_input(name, traced.recipe) for name in kept)
        assert planned.constants[graph] == sum(store.tensors[name].nbytes for name in kept)
    # Parts of one input lie together, so the plan rounds up to whole units more often.
    assert 0 <= planned.bound - sum(map(aligned, bound.values())) <= 256 * len(store.tensors)


def test_dense_weights_in_int4_are_in_both_engines(published: ModelSpec) -> None:
    int4 = {"format": "int4", "group_size": 64}
    recipe = workload(published, "rtx5090", recipe_of(experts=int4, attention=int4, dense_mlp=int4), 8192).recipe
    store = lay_out_store(published, recipe)
    dense = bytes_of(store)["attention"] + bytes_of(store)["dense_mlp"]
    for constants in weights_in_engines(published, recipe, store).constants.values():
        assert 0.9 * dense < constants < 1.1 * dense
