"""Graphs of quantized recipes: what they hold, and that nothing but rounding separates them from the float32 graph.

The weights are made multiples of their scales first, so that quantizing them loses nothing; what rounds activations is
taken out of the graphs. What is left must compute what the float32 graph computes from the same weights.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from safetensors.torch import load_file, save_file

from dgcompile.checkpoint import Checkpoint
from dgcompile.contract import graph_inputs
from dgcompile.quantize.convert import convert_weights
from dgcompile.quantize.formats import FORMATS
from dgcompile.recipe import Recipe, WeightRecipe, weight_class
from dgcompile.target import Target
from dgcompile.trace import trace_graphs
from dgcompile.trace.functions import function_protos
from dgcompile.weights_store import lay_out_store, with_static_scale
from tests.models import random_checkpoint

RECIPES = ("fp8", "mixed")
LAYERS = 2
# Two ways of summing the same float32 numbers through two layers; seen: 1e-5.
RELATIVE = 1e-4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(
        tmp_path_factory.mktemp("checkpoint"),
        layers=("sliding", "full"),
        hidden=64,
        intermediate=64,
        moe_intermediate=64,
        with_tokenizer=False,
    )


def recipe_of(name: str) -> Recipe:
    """A recipe for the CPU. "mixed" is w4a8 with the other formats in dense layers; fp8 has INT8 and static scales."""
    recipe = Recipe.load("w4a8" if name == "mixed" else name).for_target(Target.load("cpu"))
    if name == "mixed":
        dense = {"attention": WeightRecipe(format="fp8"), "dense_mlp": WeightRecipe(format="int4", group_size=32)}
        weights = recipe.weights.model_copy(update=dense)
        recipe = recipe.model_copy(update={"name": "mixed", "weights": weights})
    return recipe


@pytest.fixture(scope="module", params=RECIPES)
def traced(request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A recipe and a folder with its two graphs."""
    folder, recipe = tmp_path_factory.mktemp(request.param), recipe_of(request.param)
    source = Checkpoint.open(checkpoint)
    recipe.check_model(source.spec)
    trace_graphs(source.config, source.spec, recipe, folder)
    return recipe, folder


def on_the_grid(checkpoint: Path, recipe: Recipe, folder: Path) -> Path:
    """The checkpoint with weights that the recipe stores without loss."""
    folder.mkdir()
    for file in checkpoint.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    spec = Checkpoint.open(folder).spec
    for name in spec.expected_tensors():
        how = recipe.weights.of(weight_class(name))
        known = FORMATS[how.format]
        tensors[name] = known.decode(known.encode(tensors[name], how.group_size, "F32"), how.group_size).clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def without_rounding(model: onnx.ModelProto) -> onnx.ModelProto:
    """A graph whose activations are not rounded: w4a8 computes as int4, and values pass by static scales."""
    made = {node.output[0]: node for node in model.graph.node}
    past = {
        node.output[0]: made[node.input[0]].input[0]
        for node in model.graph.node
        if node.op_type == "DequantizeLinear" and getattr(made.get(node.input[0]), "op_type", "") == "QuantizeLinear"
    }
    for node in model.graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = past.get(name, name)
        for attribute in node.attribute:
            if attribute.name == "weight_format" and attribute.s == b"w4a8":
                attribute.s = b"int4"
                del model.functions[:]
                model.functions.extend(function_protos("int4"))
    return model


def first_step(model: onnx.ModelProto, folder: Path, spec: Any) -> dict[str, np.ndarray]:
    """Logits and more of one denoising step on an empty cache."""
    model.graph.output.append(helper.make_tensor_value_info("logits", TensorProto.FLOAT, None))
    onnx.save(model, str(folder / "probe.onnx"))
    options = onnxruntime.SessionOptions()
    # As the runtime's sessions have it; by default onnxruntime may round activations to int8.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    session = onnxruntime.InferenceSession(str(folder / "probe.onnx"), options, providers=["CPUExecutionProvider"])
    random, feed = np.random.default_rng(0), {}
    for tensor in graph_inputs("denoiser", spec, "float32"):
        shape = [2 if axis == "batch" else 7 if isinstance(axis, str) else axis for axis in tensor.shape]
        if tensor.dtype == "int32":
            feed[tensor.name] = random.integers(1, 7, shape, dtype=np.int32)
        else:
            feed[tensor.name] = random.random(shape, dtype=np.float32)
    names = ["logits", "next_self_conditioning", "entropy"]
    return dict(zip(names, session.run(names, feed), strict=True))


def test_without_rounding_every_recipe_computes_what_float32_computes(
    traced: tuple[Recipe, Path], checkpoint: Path, tmp_path: Path, float32: Path
) -> None:
    recipe, folder = traced
    source = Checkpoint.open(on_the_grid(checkpoint, recipe, tmp_path / "grid"))
    ranges = dict.fromkeys(with_static_scale(source.spec, recipe), 1.0)
    convert_weights(source, recipe, folder, input_amax=ranges)
    convert_weights(source, recipe_of("fp32"), float32)
    graphs = {place: onnx.load(str(place / "denoiser.onnx"), load_external_data=False) for place in (folder, float32)}
    expected = first_step(graphs[float32], float32, source.spec)
    found = first_step(without_rounding(graphs[folder]), folder, source.spec)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, atol=RELATIVE * np.abs(values).max(), err_msg=name)
    # Rounding shows where it is left in: the comparison can fail.
    rounded = first_step(onnx.load(str(folder / "denoiser.onnx"), load_external_data=False), folder, source.spec)
    assert np.abs(rounded["logits"] - expected["logits"]).max() > 10 * RELATIVE * np.abs(expected["logits"]).max()


@pytest.fixture(scope="module")
def float32(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the float32 graphs."""
    folder, source = tmp_path_factory.mktemp("float32"), Checkpoint.open(checkpoint)
    trace_graphs(source.config, source.spec, recipe_of("fp32"), folder)
    return folder


def test_graphs_hold_what_the_recipe_says(traced: tuple[Recipe, Path], checkpoint: Path) -> None:
    recipe, folder = traced
    spec = Checkpoint.open(checkpoint).spec
    store = lay_out_store(spec, recipe)
    for graph, layers in (("denoiser", LAYERS), ("encoder", LAYERS - 1)):
        model = onnx.load(str(folder / f"{graph}.onnx"), load_external_data=False)
        counts = Counter(node.op_type for node in model.graph.node)
        experts = [node for node in model.graph.node if node.op_type == "MixtureOfExperts"]
        attributes = [{a.name: helper.get_attribute_value(a) for a in node.attribute} for node in experts]
        weight_format, group_size = recipe.expert_format
        assert len(experts) == layers
        assert all(found["weight_format"].decode() == weight_format for found in attributes)
        assert all(found["group_size"] == group_size for found in attributes)
        assert {len(node.input) for node in experts} == {5 if weight_format == "float" else 7}
        # Every tensor of the store that the graph uses is a reference with the store's own bytes.
        used = {tensor.name: tensor for tensor in model.graph.initializer if tensor.name in store.tensors}
        for name, tensor in used.items():
            where = {entry.key: entry.value for entry in tensor.external_data}
            assert (int(where["offset"]), int(where["length"])) == (
                store.tensors[name].offset,
                store.tensors[name].nbytes,
            )
        dense = [name for name in used if weight_class(name) in ("dense_mlp", "attention", "self_conditioning")]
        blocks = [n for n in model.graph.node if any(a.name == "block_size" for a in n.attribute)]
        in_int4 = [name for name in dense if used[name].data_type == TensorProto.INT4]
        assert len(blocks) == len(in_int4) == (3 * layers if recipe.name == "mixed" else 0)
        static = 3 * layers + (3 if graph == "denoiser" else 0) if recipe.name == "fp8" else 0
        assert counts["QuantizeLinear"] == len([n for n in used if n.endswith(".input_scale")]) == static
        # Waypoints that evaluations look at.
        made = {output for node in model.graph.node for output in node.output}
        assert {f"hidden_states.{index}" for index in range(layers)} <= made
        assert ("logits" in made) == (graph == "denoiser")


def test_a_quantized_store_is_the_same_bytes_whatever_the_shards(checkpoint: Path, tmp_path: Path) -> None:
    from tests.tiny_checkpoint import split, write_checkpoint

    tensors = load_file(checkpoint / "model.safetensors")
    config = Checkpoint.open(checkpoint).config
    digests = set()
    for shards in (1, 3, 7):
        folder = tmp_path / str(shards)
        source = Checkpoint.open(
            write_checkpoint(folder, tensors, shards=split(sorted(tensors), shards), config=config)
        )
        for threads in (1, 2):
            torch.set_num_threads(threads)
            digests.add(convert_weights(source, recipe_of("int4"), tmp_path).sha256)
    assert len(digests) == 1
