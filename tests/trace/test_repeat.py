"""Repeated layers: the graph of a deep model from a shallow trace is the one that tracing the deep model gives."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest
import yaml

from dgcompile.contract import GRAPH_FILES, GraphName
from dgcompile.errors import TraceError
from dgcompile.model_spec import ModelSpec
from dgcompile.recipe import Recipe
from dgcompile.target import Target
from dgcompile.trace import repeat, trace_graphs
from dgcompile.weights_store import lay_out_store
from tests.build.test_quantized import EVERYTHING
from tests.model_config import SMALL_SIZES, published_form
from tests.test_model_spec import saved_by_transformers

PATTERN = ["sliding", "sliding", "full", "full", "sliding", "full"]


def deep_config(layers: list[str] = PATTERN) -> dict[str, Any]:
    kinds = [f"{kind}_attention" for kind in layers]
    return published_form(dtype="bfloat16", layer_types=kinds, num_hidden_layers=len(kinds), **SMALL_SIZES)


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return Recipe.model_validate(yaml.safe_load(EVERYTHING)).for_target(Target.load("cpu"))


@pytest.fixture(scope="module")
def repeated(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = deep_config()
    folder = tmp_path_factory.mktemp("repeated")
    trace_graphs(config, ModelSpec.from_config(config), recipe, folder)
    return folder


@pytest.fixture(scope="module")
def whole(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = deep_config()
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repeat, "representative_layers", lambda spec: tuple(range(spec.num_hidden_layers)))
        trace_graphs(config, ModelSpec.from_config(config), recipe, folder)
    return folder


def meanings(file: Path) -> dict[str, str]:
    """What each value of a graph is computed as, by its name: equal for graphs that differ in names inside only."""
    graph = onnx.load(file, load_external_data=False).graph
    found = {value.name: hashlib.sha256(value.SerializeToString()).hexdigest() for value in graph.input}
    for tensor in graph.initializer:
        name = tensor.name
        if not tensor.external_data:
            tensor.ClearField("name")  # a constant is its number
        found[name] = hashlib.sha256(tensor.SerializeToString()).hexdigest()
    for node in graph.node:
        attributes = sorted(attribute.SerializeToString() for attribute in node.attribute)
        sources = [found[name] if name else "" for name in node.input]
        meaning = hashlib.sha256(repr((node.domain, node.op_type, attributes, sources)).encode()).hexdigest()
        found |= {name: f"{meaning}:{place}" for place, name in enumerate(node.output)}
    return found


@pytest.mark.parametrize("graph", GRAPH_FILES)
def test_repeated_layers_are_those_of_a_whole_trace(repeated: Path, whole: Path, graph: GraphName) -> None:
    files = [folder / GRAPH_FILES[graph] for folder in (repeated, whole)]
    found, expected = (meanings(file) for file in files)
    models = [onnx.load(file, load_external_data=False) for file in files]
    outputs = [[value.SerializeToString() for value in model.graph.output] for model in models]
    assert outputs[0] == outputs[1]
    named = {value.name for value in models[1].graph.output} | {name for name in expected if "hidden_states." in name}
    assert named >= {f"hidden_states.{layer}" for layer in range(len(PATTERN) - 1)}
    assert {name: found[name] for name in named} == {name: expected[name] for name in named}
    assert len(models[0].graph.node) == len(models[1].graph.node)
    assert len(models[0].graph.initializer) == len(models[1].graph.initializer)


def test_repeated_layers_are_the_same_bytes_again(repeated: Path, recipe: Recipe, tmp_path: Path) -> None:
    config = deep_config()
    trace_graphs(config, ModelSpec.from_config(config), recipe, tmp_path)
    for file in GRAPH_FILES.values():
        assert (
            hashlib.sha256((tmp_path / file).read_bytes()).digest()
            == hashlib.sha256((repeated / file).read_bytes()).digest()
        ), file


@pytest.mark.parametrize("graph", GRAPH_FILES)
def test_every_node_and_value_has_a_name_of_its_own_and_a_layer_in_it(repeated: Path, graph: GraphName) -> None:
    nodes = onnx.load(repeated / GRAPH_FILES[graph], load_external_data=False).graph.node
    names, values = [node.name for node in nodes], [name for node in nodes for name in node.output]
    assert len(set(names)) == len(names) and len(set(values)) == len(values)
    attention = [node.name for node in nodes if node.op_type == "BlockAttention"]
    between = range(1, len(PATTERN) - 1)
    assert [name for name in attention if name.startswith("layers.")] == [
        name for layer in between for name in attention if name.startswith(f"layers.{layer}/")
    ]
    assert len(attention) == len(PATTERN) - (graph == "encoder")


def test_the_layers_that_are_traced() -> None:
    def chosen(*layers: Any) -> tuple[int, ...]:
        return repeat.representative_layers(ModelSpec.from_config(deep_config(list(layers))))

    published = (["sliding"] * 5 + ["full"]) * 5
    assert chosen(*published) == (0, 1, 5, 29)
    assert chosen("full") == (0,)
    assert chosen("sliding", "full") == (0, 1)
    assert chosen("sliding", "sliding", "full", "full") == (0, 1, 2, 3)
    assert chosen("full", "full", "full", "full") == (0, 1, 3)
    assert chosen("full", "sliding", "full", "sliding", "full") == (0, 1, 2, 4)


@pytest.mark.parametrize("form", ["published", "transformers"])
def test_the_shallow_config_describes_the_chosen_layers(form: str, tmp_path: Path) -> None:
    layers = [*PATTERN, *PATTERN]  # ten and more: transformers pads the keys of per_layer_config
    config = deep_config(layers)
    if form == "transformers":
        config = saved_by_transformers(config, tmp_path)
    spec = ModelSpec.from_config(config)
    chosen = repeat.representative_layers(spec)
    shallow = ModelSpec.from_config(repeat.shallow_config(config, chosen))
    assert shallow.layers == tuple(spec.layers[number] for number in chosen)
    assert shallow.model_copy(update={"layers": spec.layers}) == spec
    assert len(config["text_config"]["layer_types"]) == len(layers)


def small_graph(*, tied: bool) -> ir.Model:
    """Four layers that add their weight; with ``tied``, one also reads a value inside the one before."""

    def value(name: str) -> ir.Value:
        return ir.Value(name=name, shape=ir.Shape([2]), type=ir.TensorType(ir.DataType.FLOAT))

    inputs = [value("x"), *(value(name) for layer in range(4) for name in repeat.past_names(layer))]
    by_name = {each.name: each for each in inputs}
    nodes, weights, hidden, inside = [], [], by_name["x"], by_name["x"]
    for layer in range(4):
        weight = value(f"model.layers.{layer}.weight")
        weight.const_value = ir.ExternalTensor(
            "weights", 0, 8, ir.DataType.FLOAT, shape=ir.Shape([2]), name=weight.name
        )
        weights.append(weight)
        first = ir.node("Add", [hidden, weight], name=f"a{layer}")
        second = ir.node("Add", [first.outputs[0], inside if tied else by_name[f"past_key_values.{layer}.key"]])
        first.outputs[0].name, second.outputs[0].name = f"inside{layer}", f"hidden_states.{layer}"
        hidden, inside = second.outputs[0], first.outputs[0]
        nodes += [first, second]
    graph = ir.Graph(inputs, [hidden], nodes=nodes, initializers=weights, name="encoder", opset_imports={"": 21})
    return ir.Model(graph, ir_version=10)


def test_layers_that_are_tied_to_one_another_are_refused() -> None:
    spec = ModelSpec.from_config(deep_config(["full"] * 6))
    model = small_graph(tied=True)
    with pytest.raises(TraceError, match=r"layer 1 of the traced graph (reads inside0|gives out inside1)"):
        repeat.repeat_layers("encoder", model, (0, 1, 2, 5), spec, "float32", lay_out_store(spec, Recipe.load("fp32")))
