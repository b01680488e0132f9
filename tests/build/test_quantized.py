"""Builds of a recipe with every kind of number format: from the checkpoint to text, and to engines for an RTX 5090."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import yaml
from onnxruntime import OrtValue
from safetensors.torch import load_file, save_file

from dgcompile.build import build, stages
from dgcompile.build.tensorrt.dense import lift_dense
from dgcompile.bundle import CALIBRATION_FILE, WEIGHTS_FILE, Bundle
from dgcompile.checkpoint import Checkpoint
from dgcompile.contract import GRAPH_FILES, GraphName
from dgcompile.engine_table import EngineTable, layers_file, table_file
from dgcompile.errors import CheckpointError, InputError, RecipeError, StageError
from dgcompile.progress import Progress
from dgcompile.quantize.calibration import Calibration
from dgcompile.quantize.convert import convert_weights
from dgcompile.recipe import Recipe, WeightRecipe
from dgcompile.runtime.onnxruntime_session import session_options
from dgcompile.runtime.pipeline import Pipeline
from dgcompile.runtime.weight_loading import load_weights, stored_weights
from dgcompile.safetensors_file import read_header
from dgcompile.target import Target
from dgcompile.weights_store import class_sizes, with_static_scale
from tests.build.helpers import Labels, content, readers, unfinished_copy
from tests.models import random_checkpoint
from tests.runtime.host_device import HostDevice

EXPERTS = "model.decoder.layers.0.experts.gate_up_proj"
EVERYTHING = """
name: everything
title: every number format
weights:
  experts: {format: int4, group_size: 32, activations: fp8_dynamic}
  attention: int8
  dense_mlp: {format: fp8, activations: fp8_static}
  self_conditioning: fp8
  embedding: bf16
  router: bf16
  norms: bf16
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that quantizes in every format, with heads that kernels take and prompts to calibrate with."""
    folder = random_checkpoint(
        tmp_path_factory.mktemp("checkpoint"),
        layers=("sliding", "full"),
        hidden=64,
        intermediate=64,
        moe_intermediate=64,
        head_dim=16,
        full_head_dim=32,
    )
    prompts = [json.dumps({"prompt": text}) for text in ("One", "and two", "and three")]
    (folder / "calibration.jsonl").write_text("\n".join(prompts) + "\n")
    return folder


def recipe() -> Recipe:
    return Recipe.model_validate(yaml.safe_load(EVERYTHING))


def quantized_build(source: Path, folder: Path, target: str = "cpu", **options: Any) -> list[str]:
    progress = Labels()
    build(source, Target.load(target), recipe(), folder, progress=progress, **options)
    return progress.stages


@pytest.fixture(scope="module")
def built(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cpu bundle of ``source``. Shared by all tests: do not write into it."""
    folder = tmp_path_factory.mktemp("bundles") / "cpu"
    ran = quantized_build(source, folder)
    assert ran == ["assets", "trace", "calibration", "weights", "engine"]
    assert quantized_build(source, folder) == []
    return folder


def test_from_the_checkpoint_to_text(built: Path) -> None:
    pipeline = Pipeline.open(built)
    config = pipeline.bundle.generation.replace(max_new_tokens=20)
    result = pipeline.generate([pipeline.encode([{"role": "user", "content": "One"}])], config, [1])[0]
    assert 0 < len(result.token_ids) <= 20


def test_ranges_are_kept_and_weights_as_small_as_promised(built: Path) -> None:
    bundle = Bundle.open(built)
    calibration = Calibration.model_validate_json((built / CALIBRATION_FILE).read_bytes())
    assert set(calibration.input_amax) == set(with_static_scale(bundle.spec, bundle.recipe))
    assert calibration.report.prompts == 3
    stored = load_file(built / WEIGHTS_FILE)
    for name, amax in calibration.input_amax.items():
        assert float(stored[name.replace("weight", "input_scale")]) == pytest.approx(amax / 448)
    sizes = class_sizes(bundle.spec, bundle.recipe, read_header(built / WEIGHTS_FILE))
    assert sizes["experts"].bits == 4.5
    assert all(size.stored_bytes == size.exact_bytes for size in sizes.values())


def test_weights_that_are_not_as_small_as_promised_are_refused(source: Path, built: Path, tmp_path: Path) -> None:
    """A store that some other recipe made: right names and shapes of the model, experts of twice the size."""
    manifest = Bundle.open(built).manifest
    larger = manifest.recipe.weights.model_copy(update={"experts": WeightRecipe(format="fp8")})
    other = manifest.recipe.model_copy(update={"weights": larger})
    ranges = Calibration.model_validate_json((built / CALIBRATION_FILE).read_bytes()).input_amax
    convert_weights(Checkpoint.open(source), other, tmp_path, input_amax=ranges)
    stages._check_sizes(built / WEIGHTS_FILE, manifest)
    with pytest.raises(StageError, match=r"experts in int4 g32 fp8_dynamic take [\d,]+ bytes; expected [\d,]+ bytes"):
        stages._check_sizes(tmp_path / WEIGHTS_FILE, manifest)


@pytest.mark.parametrize("stage", ["calibration", "weights"])
def test_a_killed_build_ends_with_the_same_bytes(source: Path, built: Path, tmp_path: Path, stage: Any) -> None:
    folder = unfinished_copy(built, tmp_path / "bundle", stage)
    (folder / f"{WEIGHTS_FILE}.partial").write_bytes(b"half")
    assert stage in quantized_build(source, folder)
    assert content(folder) == content(built)


def test_other_prompts_calibrate_again(source: Path, built: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(built, tmp_path / "bundle")
    other = tmp_path / "other.jsonl"
    other.write_text('{"prompt": "something else"}\n')
    ran = quantized_build(source, Path(folder), calibration=other)
    assert "calibration" in ran and "trace" not in ran
    assert (Path(folder) / CALIBRATION_FILE).read_bytes() != (built / CALIBRATION_FILE).read_bytes()


def test_another_generation_config_calibrates_again(source: Path, built: Path, tmp_path: Path) -> None:
    changed = Path(shutil.copytree(source, tmp_path / "checkpoint"))
    settings = json.loads((changed / "generation_config.json").read_text())
    settings["max_denoising_steps"] = 3
    (changed / "generation_config.json").write_text(json.dumps(settings))
    folder = Path(shutil.copytree(built, tmp_path / "bundle"))
    ran = quantized_build(changed, folder)
    assert {"assets", "calibration"} <= set(ran) and "trace" not in ran


def test_refused_prompts_leave_a_finished_bundle_alone(source: Path, built: Path, tmp_path: Path) -> None:
    before, prompts = content(built), tmp_path / "prompts.jsonl"
    for text in ("", '{"prompt": "One"}\n{"prompt": 1}\n'):
        prompts.write_text(text)
        with pytest.raises(InputError):
            quantized_build(source, built, calibration=prompts)
        assert content(built) == before


def test_engines_for_an_rtx_5090_multiply_what_the_recipe_says(source: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    folder = tmp_path / "bundle"
    quantized_build(source, folder, "rtx5090", max_context=96)
    for graph in GRAPH_FILES:
        layers = (folder / layers_file(graph)).read_text()
        weights = {tensor.name: tensor for tensor in EngineTable.read(folder / table_file(graph)).weights}
        # Dense weights are read in their formats, by one product each; those of MLPs with static scales are FP8's own.
        products = {name: readers(layers, name) for name in weights if "_proj.weight" in name}
        assert len(products) == (12 if graph == "denoiser" else 6)
        for name, found in products.items():
            unpacked = [("runtime_fusion", "Int8" if "self_attn" in name else "FP8")]
            assert found == ([("gemm", "FP8")] if "mlp" in name else unpacked), (graph, name)
        assert (weights[EXPERTS].dtype, weights[EXPERTS].shape[1:]) == ("int8", (1, 128, 32))
        assert (weights[EXPERTS + "_scale"].dtype, weights[EXPERTS + "_scale"].shape[1:]) == ("float16", (2, 128))


# dense weights as inputs -------------------------------------------------------------------------------------------


SIZES = {"batch": 2, "new_tokens": 5}
CAPACITY, PAST = 9, (7, 3)
TYPES = {"tensor(float)": np.float32, "tensor(int32)": np.int32}


def feeds(session: onnxruntime.InferenceSession, vocabulary: int) -> dict[str, np.ndarray]:
    """Two rows of different lengths."""
    random = np.random.default_rng(0)
    given: dict[str, np.ndarray] = {}
    for value in session.get_inputs():
        shape = [axis if isinstance(axis, int) else SIZES.get(axis, CAPACITY) for axis in value.shape]
        if value.name.endswith("_ids"):
            given[value.name] = random.integers(0, vocabulary, shape)
        elif value.name in ("past_length", "input_length"):
            given[value.name] = np.array(PAST if value.name == "past_length" else (5, 2))
        elif value.name in ("temperature", "entropy_bound", "uniform"):
            given[value.name] = random.uniform(0.1, 0.9, shape)
        else:
            given[value.name] = random.normal(size=shape)
        given[value.name] = given[value.name].astype(TYPES[value.type])
    return given


@pytest.mark.parametrize("graph", GRAPH_FILES)
def test_the_graph_with_dense_inputs_computes_the_same(built: Path, tmp_path: Path, graph: GraphName) -> None:
    # As an engine is given it, with weights as sessions load them.
    os.link(built / WEIGHTS_FILE, tmp_path / WEIGHTS_FILE)
    model = onnx.load(built / GRAPH_FILES[graph], load_external_data=False)
    inputs = lift_dense(model.graph)
    onnx.save(model, tmp_path / "lifted.onnx")
    options = session_options(tmp_path, 1)
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    sessions = [
        onnxruntime.InferenceSession(file, options) for file in (built / GRAPH_FILES[graph], tmp_path / "lifted.onnx")
    ]
    given = feeds(sessions[0], Bundle.open(built).spec.vocab_size)
    expected = sessions[0].run(None, given)

    table = EngineTable(graph=graph, tensors=tuple(inputs.values()))
    device, weights = HostDevice(), stored_weights([table], built / WEIGHTS_FILE)
    addresses = load_weights(device, weights, Progress(), staging_bytes=1000)
    feed = {name: OrtValue.ortvalue_from_numpy(value) for name, value in given.items()}
    elements = {"int8": onnx.TensorProto.INT8, "float8e4m3fn": onnx.TensorProto.FLOAT8E4M3FN}
    for tensor in inputs.values():
        data = device.view(addresses[tensor.name], weights[tensor.name].nbytes).reshape(tensor.shape)
        # onnxruntime takes 8-bit floats as bytes.
        packed = np.ascontiguousarray(data.view(np.int8) if tensor.dtype == "int8" else data)
        feed[tensor.name] = OrtValue.ortvalue_from_numpy_with_onnx_type(packed, elements[tensor.dtype])
    found = [value.numpy() for value in sessions[1].run_with_ort_values(None, feed)]
    for output, wanted, actual in zip(sessions[0].get_outputs(), expected, found, strict=True):
        assert np.isfinite(wanted).all()
        if wanted.dtype != np.float32:
            assert (wanted == actual).all(), output.name
            continue
        # The same multiply-adds in another order: roundings of float32 through two layers.
        assert np.abs(wanted - actual).max() <= 1e-4 * np.abs(wanted).max(), output.name


@pytest.mark.parametrize("graph", GRAPH_FILES)
def test_every_matrix_of_a_dense_layer_is_an_input(built: Path, graph: GraphName) -> None:
    model = onnx.load(built / GRAPH_FILES[graph], load_external_data=False)
    inputs = lift_dense(model.graph)
    left = [tensor for tensor in model.graph.initializer if tensor.external_data and len(tensor.dims) == 2]
    assert {tensor.name.rsplit(".", 2)[-2] for tensor in left} <= {"embed_tokens", "proj"}  # proj: of the router
    assert not {tensor.name for tensor in model.graph.initializer} & set(inputs)
    assert {value.name for value in model.graph.input} >= set(inputs)
    together = sorted(len(tensor.parts) for tensor in inputs.values())
    # Queries, keys and values; keys are values in the second layer. Gate and up stay apart where they are rounded.
    assert together == ([1] * 9 + [2, 2, 3] if graph == "denoiser" else [1] * 5 + [3])
    for tensor in inputs.values():
        rounded = ".mlp." in tensor.name
        assert tensor.transposed is not rounded
        assert tensor.dtype == ("int8" if "self_attn" in tensor.name else "float8e4m3fn")


# refused before any work ----------------------------------------------------------------------------------------------


def refused(error: type[Exception], source: Path, folder: Path, **options: Any) -> str:
    with pytest.raises(error) as caught:
        quantized_build(source, folder, **options)
    return str(caught.value)


def without_prompts(source: Path, folder: Path) -> Path:
    copy = shutil.copytree(source, folder)
    (copy / "calibration.jsonl").unlink()
    return Path(copy)


def test_prompts_that_are_missing_or_for_nothing(source: Path, tmp_path: Path) -> None:
    bare = without_prompts(source, tmp_path / "bare")
    text = refused(InputError, bare, tmp_path / "out")
    assert "calibration.jsonl is missing" in text and "--calibration FILE" in text
    assert not (tmp_path / "out").exists()
    with pytest.raises(InputError, match="recipe 'int4', which has no static scales"):
        build(
            source, Target.load("cpu"), Recipe.load("int4"), tmp_path / "out", calibration=source / "calibration.jsonl"
        )


def test_shapes_that_do_not_divide(tmp_path: Path) -> None:
    source = random_checkpoint(tmp_path / "checkpoint", hidden=64, intermediate=64, moe_intermediate=16)
    text = refused(RecipeError, source, tmp_path / "out")
    assert "experts in groups of 32" in text and "16 places" in text


def test_a_weight_that_is_not_finite_or_too_large(source: Path, built: Path, tmp_path: Path) -> None:
    for value, message in ((float("nan"), "holds NaN or infinity"), (1e6, "does not fit int4 g32 fp8_dynamic")):
        damaged = Path(shutil.copytree(source, tmp_path / f"source {value}"))
        tensors = load_file(damaged / "model.safetensors")
        tensors[EXPERTS][0, 0, 0] = value
        save_file(tensors, damaged / "model.safetensors", metadata={"format": "pt"})
        # The graphs of the undamaged one will do: only the weights are to be made.
        folder = unfinished_copy(built, tmp_path / f"bundle {value}", "weights")
        with pytest.raises((CheckpointError, StageError)) as caught:
            ranges = Calibration.model_validate_json((folder / CALIBRATION_FILE).read_bytes()).input_amax
            convert_weights(
                Checkpoint.open(damaged), recipe().for_target(Target.load("cpu")), folder, input_amax=ranges
            )
        assert EXPERTS in str(caught.value) and message in str(caught.value)
        assert not (folder / WEIGHTS_FILE).exists()
