"""Bundles for GPUs: their graphs in float32 on the CPU, before engines or kernels exist."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from dgcompile.build import build
from dgcompile.bundle import Manifest
from dgcompile.evaluate import evaluate
from dgcompile.progress import Advance, Progress
from dgcompile.recipe import Recipe
from dgcompile.target import Target
from dgcompile.verify.widen import widen
from tests.evaluate.conftest import EXAMPLES
from tests.models import random_checkpoint

pytest.importorskip("triton")

RECIPE = """
name: mixed
title: FP8 where the small model can have it
weights:
  {experts: fp8, attention: fp8, dense_mlp: bf16, self_conditioning: fp8, embedding: bf16, router: bf16, norms: bf16}
"""


class Enough(BaseException):
    """Ends a build."""


class UntilKernels(Progress):
    """Ends a build when its kernels are to be compiled."""

    @contextmanager
    def task(self, label: str, total: float | None = None, unit: str = "") -> Iterator[Advance]:
        if "kernels" in label:
            raise Enough
        with super().task(label, total, unit) as advance:
            yield advance


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Kernels take heads from 16 on.
    return random_checkpoint(tmp_path_factory.mktemp("checkpoint"), layers=["sliding", "full"], head_dim=16)


@pytest.fixture(scope="module")
def gpu_bundle(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu")
    (folder / "mixed.yaml").write_text(RECIPE)
    with pytest.raises(Enough):
        build(
            source,
            Target.load("rtx5090"),
            Recipe.load(folder / "mixed.yaml"),
            folder / "bundle",
            progress=UntilKernels(),
        )
    return folder / "bundle"


def test_graphs_for_a_gpu_are_evaluated_in_float32(gpu_bundle: Path, source: Path) -> None:
    manifest = Manifest.read(gpu_bundle)
    assert manifest.unfinished == ("kernels", "engine") and manifest.recipe.activation_dtype == "bfloat16"
    report = evaluate(gpu_bundle, source, prompts=EXAMPLES[:2], max_new_tokens=16, threads=1)
    assert report.graphs_only and report.target == "rtx5090" and report.recipe == "mixed"
    # E4M3 keeps three bits of a weight: off by two hundredths on average, and the layers add to that.
    assert 1e-3 < report.layers[0].relative_error < 0.2
    assert 1e-3 < report.first_step.relative_error < 0.5 and 1e-6 < report.first_step.kl < 1
    bits = {row.weight_class: row.bits_per_weight for row in report.weights}
    assert bits["dense_mlp"] == bits["norms"] == 16 and 8 < bits["attention"] < 10 and 8 < bits["experts"] < 11


@pytest.mark.parametrize("code", [TensorProto.INT4, TensorProto.FLOAT8E4M3FN])
def test_codes_stay_as_they_are_and_scales_are_widened(code: int, tmp_path: Path) -> None:
    rows, places = 3, 8
    values = np.random.default_rng(0).integers(-7, 8, (rows, places))
    scales = (2.0 ** np.arange(-rows, 0)).astype(np.float32)
    if code == TensorProto.INT4:
        codes = helper.make_tensor("codes", code, [rows, places], values.flatten().tolist())
        attributes, shaped = {"axis": 1, "block_size": 4}, np.tile(scales[:, None], (1, 2))
    else:
        raw = values.astype(ml_dtypes.float8_e4m3fn).tobytes()
        codes = helper.make_tensor("codes", code, [rows, places], raw, raw=True)
        attributes, shaped = {"axis": 0}, scales
    stored = shaped.astype(ml_dtypes.bfloat16).tobytes()
    (tmp_path / "weights").write_bytes(stored)
    scale = TensorProto(name="scale", data_type=TensorProto.BFLOAT16, dims=shaped.shape)
    scale.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "weights"), ("offset", "0"), ("length", str(len(stored)))):
        scale.external_data.add(key=key, value=value)
    nodes = [
        helper.make_node("DequantizeLinear", ["codes", "scale"], ["weight"], **attributes),
        helper.make_node("Transpose", ["weight"], ["transposed"], perm=[1, 0]),
        helper.make_node("MatMul", ["x", "transposed"], ["y"]),
    ]
    narrow = TensorProto.BFLOAT16
    graph = helper.make_graph(
        nodes,
        "product",
        [helper.make_tensor_value_info("x", narrow, [None, places])],
        [helper.make_tensor_value_info("y", narrow, [None, rows])],
        [codes, scale],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    widened = widen(model)
    assert widened.graph.initializer[0] == codes and widened.graph.initializer[1].data_type == TensorProto.BFLOAT16
    file = tmp_path / "model.onnx"
    onnx.save(widened, file)
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    x = np.random.default_rng(1).normal(size=(2, places)).astype(np.float32)
    (found,) = session.run(["y"], {"x": x})
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, x @ (values * scales[:, None]).T.astype(np.float32), rtol=1e-5, atol=1e-5)
