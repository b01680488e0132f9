"""The two ONNX files: what the contract says of them, and their numbers against transformers'."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from transformers import DiffusionGemmaForBlockDiffusion, DynamicCache

from dgcompile.checkpoint import Checkpoint
from dgcompile.contract import GraphName, TensorSpec, graph_inputs, graph_outputs, past_names
from dgcompile.errors import TraceError
from dgcompile.model_spec import ModelSpec
from dgcompile.quantize.convert import convert_weights
from dgcompile.recipe import Recipe
from dgcompile.trace import modules, trace_graphs
from dgcompile.verify.widen import widen
from dgcompile.weights_store import WEIGHTS_FILE, lay_out_store

# fp32 against fp32 through a few layers, relative to the largest value: rounding gives 1e-6, a wrong position 1e-1.
RELATIVE = 1e-4
# Random models have steps where rounding alone is amplified beyond that. What counts as rounding there is measured:
# transformers against itself with every weight moved by one rounding of fp32, times this factor.
CONDITIONING = 4.0
GRAPHS: tuple[GraphName, ...] = ("encoder", "denoiser")


@pytest.fixture(scope="module")
def spec(checkpoint: Path) -> ModelSpec:
    return ModelSpec.from_config(json.loads((checkpoint / "config.json").read_text()))


@pytest.fixture(scope="module")
def graphs(bundle: Path) -> dict[str, onnx.ModelProto]:
    return {name: onnx.load(bundle / f"{name}.onnx", load_external_data=False) for name in GRAPHS}


@pytest.fixture(scope="module")
def sessions(bundle: Path) -> dict[str, onnxruntime.InferenceSession]:
    return {name: onnxruntime.InferenceSession(bundle / f"{name}.onnx") for name in GRAPHS}


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> DiffusionGemmaForBlockDiffusion:
    return load_reference(checkpoint)


@pytest.fixture(scope="module")
def rounded_model(checkpoint: Path) -> DiffusionGemmaForBlockDiffusion:
    loaded = load_reference(checkpoint)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.mul_(1 + 2.0**-24 * torch.randn(parameter.shape, generator=generator))
    return loaded


def load_reference(checkpoint: Path) -> DiffusionGemmaForBlockDiffusion:
    loaded = DiffusionGemmaForBlockDiffusion.from_pretrained(checkpoint, dtype=torch.float32)
    loaded.set_experts_implementation("eager")
    return loaded.train(False)


@pytest.mark.parametrize("name", GRAPHS)
def test_checker_accepts_the_file_with_its_weights(bundle: Path, name: str) -> None:
    onnx.checker.check_model(str(bundle / f"{name}.onnx"), full_check=True)


@pytest.mark.parametrize("name", GRAPHS)
def test_inputs_and_outputs_are_those_of_the_contract(
    graphs: dict[str, onnx.ModelProto], spec: ModelSpec, name: Any
) -> None:
    def table(values: Any) -> list[tuple[str, int, tuple[int | str, ...]]]:
        return [
            (
                value.name,
                value.type.tensor_type.elem_type,
                tuple(axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim),
            )
            for value in values
        ]

    def wanted(specs: list[TensorSpec]) -> list[tuple[str, int, tuple[int | str, ...]]]:
        types = {"float32": onnx.TensorProto.FLOAT, "int32": onnx.TensorProto.INT32, "bool": onnx.TensorProto.BOOL}
        return [(tensor.name, types[tensor.dtype], tensor.shape) for tensor in specs]

    graph = graphs[name].graph
    assert table(graph.input) == wanted(graph_inputs(name, spec, "float32"))
    assert table(graph.output) == wanted(graph_outputs(name, spec, "float32"))


def test_one_custom_node_per_layer_and_nothing_of_the_encoders_last_layer(
    graphs: dict[str, onnx.ModelProto], spec: ModelSpec
) -> None:
    counts = {name: Counter(node.op_type for node in model.graph.node) for name, model in graphs.items()}
    layers = spec.num_hidden_layers
    assert counts["denoiser"]["BlockAttention"] == counts["denoiser"]["MixtureOfExperts"] == layers
    # The last layer's keys and values are all that the encoder needs of it.
    assert counts["encoder"]["BlockAttention"] == counts["encoder"]["MixtureOfExperts"] == layers - 1
    used = {tensor.name for tensor in graphs["encoder"].graph.initializer}
    last = f"model.decoder.layers.{layers - 1}."
    assert {name for name in used if name.startswith(last)} == {
        last + name for name in ("input_layernorm.weight", "self_attn.k_proj.weight", "self_attn.k_norm.weight")
    }
    assert "model.decoder.norm.weight" not in used


@pytest.mark.parametrize("name", GRAPHS)
def test_every_weight_is_a_reference_into_the_store(
    graphs: dict[str, onnx.ModelProto], spec: ModelSpec, name: str
) -> None:
    store = lay_out_store(spec, Recipe.load("fp32")).tensors
    inline = 0
    for tensor in graphs[name].graph.initializer:
        if tensor.name in store:
            where = {entry.key: entry.value for entry in tensor.external_data}
            assert where["location"] == WEIGHTS_FILE
            assert int(where["offset"]) == store[tensor.name].offset
            assert int(where["length"]) == store[tensor.name].nbytes
            assert tuple(tensor.dims) == store[tensor.name].shape
        else:
            inline += tensor.ByteSize()
    assert inline < 16 * 1024
    stored = {tensor.name for tensor in graphs[name].graph.initializer} & set(store)
    unused = set(store) - stored
    if name == "denoiser":  # uses everything but the encoder's own scalars
        assert unused == {key for key in store if key.startswith("model.encoder.")}


@pytest.mark.parametrize("name", GRAPHS)
def test_the_file_says_nothing_about_the_machine_that_made_it(bundle: Path, name: str) -> None:
    data = (bundle / f"{name}.onnx").read_bytes()
    for word in (b"site-packages", b"/root", b"/home", b".py", b"stack_trace"):
        assert word not in data


TRACE_AGAIN = """
import json, sys
from pathlib import Path
from dgcompile.model_spec import ModelSpec
from dgcompile.recipe import Recipe
from dgcompile.trace import trace_graphs

config = json.loads((Path(sys.argv[1]) / "config.json").read_text())
spec = ModelSpec.from_config(config)
trace_graphs(config, spec, Recipe.load("fp32"), Path(sys.argv[2]))
"""


def test_another_process_traces_the_same_bytes(checkpoint: Path, bundle: Path, tmp_path: Path) -> None:
    # transformers iterates over sets of strings, whose order follows the hash seed.
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    subprocess.run(
        [sys.executable, "-c", TRACE_AGAIN, str(checkpoint), str(tmp_path)],
        check=True,
        env={**os.environ, "PYTHONHASHSEED": seed},
    )
    for name in GRAPHS:
        assert (tmp_path / f"{name}.onnx").read_bytes() == (bundle / f"{name}.onnx").read_bytes()


def test_a_changed_transformers_class_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class DiffusionGemmaTextExperts(torch.nn.Module):
        pass

    monkeypatch.setattr(modules.modeling, "DiffusionGemmaTextExperts", DiffusionGemmaTextExperts)
    with pytest.raises(TraceError, match=r"DiffusionGemmaTextExperts differs .* transformers 5\.24"):
        modules.check_transformers()
    monkeypatch.delattr(modules.modeling, "DiffusionGemmaTextExperts")
    with pytest.raises(TraceError, match="DiffusionGemmaTextExperts is missing"):
        modules.check_transformers()


class Reference:
    """transformers' side of one row: its cache, and the logits of a canvas."""

    def __init__(self, model: DiffusionGemmaForBlockDiffusion) -> None:
        self.model = model
        self.cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        self.length = 0
        self.previous: torch.Tensor | None = None

    def encode(self, ids: np.ndarray) -> None:
        positions = torch.arange(self.length, self.length + len(ids))[None]
        encoder = self.model.model.encoder
        masks = encoder.create_masks_for_generate(
            config=self.model.config,
            inputs_embeds=torch.empty(1, len(ids), 0),
            attention_mask=torch.ones(1, self.length + len(ids), dtype=torch.bool),
            cache=self.cache,
            position_ids=positions,
        )
        with torch.no_grad():
            encoder(
                input_ids=torch.from_numpy(ids)[None].long(),
                attention_mask=masks,
                cache=self.cache,
                position_ids=positions,
            )
        self.length += len(ids)
        self.previous = None

    def step(self, canvas: np.ndarray, temperature: float) -> dict[str, np.ndarray]:
        """One denoising step; what a sampler needs of it, and what the next step is conditioned on."""
        with torch.no_grad():
            logits = self.model(
                decoder_input_ids=torch.from_numpy(canvas)[None].long(),
                cache=self.cache,
                self_conditioning_logits=self.previous,
                decoder_position_ids=torch.arange(self.length, self.length + len(canvas))[None],
            ).logits
            self.previous = logits / temperature
            embedding = self.model.model.decoder.embed_tokens
            soft = (self.previous.softmax(-1) @ embedding.weight) * embedding.embed_scale
        return {
            "entropy": torch.distributions.Categorical(logits=self.previous).entropy().numpy(),
            "next_self_conditioning": soft.numpy(),
            "argmax_ids": self.previous.argmax(-1).numpy(),
        }


class Row:
    """One row of the engine: its cache, filled by the encoder graph."""

    def __init__(self, spec: ModelSpec, capacity: int = 96) -> None:
        self.spec = spec
        self.length = 0
        self.past: dict[str, np.ndarray] = {}
        for index, layer in enumerate(spec.layers):
            shape = (1, spec.cache_capacity(index, capacity), layer.num_key_value_heads, layer.head_dim)
            for name in past_names(index):
                self.past[name] = np.full(shape, np.nan, np.float32)

    def encode(self, session: onnxruntime.InferenceSession, ids: np.ndarray, padding: int) -> list[np.ndarray]:
        """Encodes ids [N], writes the cache, and returns the new keys and values, [N, Hkv, D] each."""
        count = len(ids)
        padded = np.concatenate([ids, np.full(padding, 2**31 - 1, ids.dtype)])[None].astype(np.int32)
        feeds = {
            "input_ids": padded,
            "input_length": np.array([count], np.int32),
            "past_length": np.array([self.length], np.int32),
        }
        new = [output[0, :count] for output in session.run(None, {**feeds, **self.past})]
        for name, rows in zip(self.past, new, strict=True):
            capacity = self.past[name].shape[1]
            for offset in range(count):
                self.past[name][0, (self.length + offset) % capacity] = rows[offset]
        self.length += count
        return new


def assert_same_keys_and_values(new: list[np.ndarray], reference: DynamicCache) -> None:
    expected = [part for layer in reference.layers for part in (layer.keys, layer.values)]
    for rows, part in zip(new, expected, strict=True):
        wanted = part.transpose(1, 2).numpy()[0][-len(rows) :]
        actual = rows[-len(wanted) :]  # a sliding layer of transformers keeps window - 1 tokens
        assert np.abs(actual - wanted).max() < RELATIVE * np.abs(wanted).max()


# The window of the fixture is 24 and its canvas 16.
@pytest.mark.parametrize("prompt", [1, 7, 22, 23, 24, 25, 40, 70])
def test_numbers_are_those_of_transformers(
    sessions: dict[str, onnxruntime.InferenceSession],
    model: DiffusionGemmaForBlockDiffusion,
    rounded_model: DiffusionGemmaForBlockDiffusion,
    spec: ModelSpec,
    prompt: int,
) -> None:
    rng = np.random.default_rng(prompt)
    row, reference, rounded = Row(spec), Reference(model), Reference(rounded_model)
    names = [tensor.name for tensor in graph_outputs("denoiser", spec, "float32")]
    temperature = 0.6
    tokens = rng.integers(spec.vocab_size, size=prompt)
    for _canvas in range(2):
        new = row.encode(sessions["encoder"], tokens, padding=prompt % 3)
        reference.encode(tokens)
        rounded.encode(tokens)
        assert_same_keys_and_values(new, reference.cache)
        signal = np.zeros((1, spec.canvas_length, spec.hidden_size), np.float32)
        canvas = rng.integers(spec.vocab_size, size=spec.canvas_length)
        for _step in range(3):
            noise = rng.integers(spec.vocab_size, size=(1, spec.canvas_length)).astype(np.int32)
            feeds = {
                "canvas_ids": canvas[None].astype(np.int32),
                "self_conditioning": signal,
                "past_length": np.array([row.length], np.int32),
                "temperature": np.array([temperature], np.float32),
                "entropy_bound": np.array([1.0], np.float32),
                "uniform": rng.random((1, spec.canvas_length), dtype=np.float32),
                "noise_ids": noise,
            }
            output = dict(zip(names, sessions["denoiser"].run(None, {**feeds, **row.past}), strict=True))
            expected, shaken = reference.step(canvas, temperature), rounded.step(canvas, temperature)
            for name in ("entropy", "next_self_conditioning"):
                rounding = np.abs(shaken[name] - expected[name]).max()
                bound = max(RELATIVE * np.abs(expected[name]).max(), CONDITIONING * rounding)
                assert np.abs(output[name] - expected[name]).max() < bound
            np.testing.assert_array_equal(output["argmax_ids"], expected["argmax_ids"])
            accepted = output["accepted"]
            assert 0 < accepted.sum() <= accepted.size
            np.testing.assert_array_equal(output["next_canvas_ids"][~accepted], noise[~accepted])
            signal, canvas = output["next_self_conditioning"], output["next_canvas_ids"][0]
        tokens = expected["argmax_ids"][0]


def test_bfloat16_graphs_are_the_float32_graphs_with_fewer_digits(
    checkpoint: Path, bundle: Path, sessions: dict[str, onnxruntime.InferenceSession], tmp_path: Path
) -> None:
    source, recipe = Checkpoint.open(checkpoint), Recipe.load("bf16")
    trace_graphs(source.config, source.spec, recipe, tmp_path)
    convert_weights(source, recipe, tmp_path)
    # The checkpoint is stored in bfloat16: nothing is lost, and every value is half as long.
    assert (tmp_path / WEIGHTS_FILE).stat().st_size < 0.6 * (bundle / WEIGHTS_FILE).stat().st_size

    random = np.random.default_rng(0)
    sizes = {"batch": 2, "new_tokens": 5}
    for name in GRAPHS:
        model = onnx.load(str(tmp_path / f"{name}.onnx"), load_external_data=False)
        elements = {value.name: value.type.tensor_type.elem_type for value in (*model.graph.input, *model.graph.output)}
        for tensor in (*graph_inputs(name, source.spec, "bfloat16"), *graph_outputs(name, source.spec, "bfloat16")):
            assert (elements[tensor.name] == onnx.TensorProto.BFLOAT16) == (tensor.dtype == "bfloat16"), tensor.name
        onnx.save(widen(model), str(tmp_path / f"{name}.wide.onnx"))
        wide = onnxruntime.InferenceSession(str(tmp_path / f"{name}.wide.onnx"), providers=["CPUExecutionProvider"])
        feed = {}
        for tensor in graph_inputs(name, source.spec, "float32"):
            shape = [sizes.get(axis, 40) if isinstance(axis, str) else axis for axis in tensor.shape]
            if tensor.dtype == "int32":
                feed[tensor.name] = random.integers(1, 6, shape, dtype=np.int32)
            else:
                feed[tensor.name] = random.random(shape, dtype=np.float32)
        names = [value.name for value in wide.get_outputs()]
        for output, found, expected in zip(names, wide.run(names, feed), sessions[name].run(names, feed), strict=True):
            # What remains are the constants that transformers itself rounds to bfloat16, such as the embedding's scale.
            off = np.abs(found.astype(np.float64) - expected).max() / max(np.abs(expected).max(), 1e-30)
            assert off < 2e-2 or output in ("next_canvas_ids", "argmax_ids", "accepted"), (output, off)
        if name == "denoiser":
            same = wide.run(["argmax_ids"], feed)[0] == sessions[name].run(["argmax_ids"], feed)[0]
            assert same.mean() > 0.9
