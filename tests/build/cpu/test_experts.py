"""Experts as the engines of the cpu target compute them, in every number format, against the reference."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dgcompile.build.onnxruntime.experts import MOST_GROUPS, groups_of
from dgcompile.plugins.moe import formats
from dgcompile.plugins.moe.formats import WeightFormat
from dgcompile.plugins.moe.torch_op import mixture_of_experts
from tests.build.cpu.rewritten import run_node
from tests.plugins.test_moe import ROUTINGS

WIDTH, INNER = 96, 32


def packed(weight: np.ndarray, weight_format: WeightFormat, group: int) -> list[tuple[np.ndarray, ir.DataType]]:
    if weight_format == "float":
        return [(weight.astype(np.float32), ir.DataType.FLOAT)]
    if weight_format == "fp8":
        codes, scale = formats.fp8_quantize(weight)
        return [(codes, ir.DataType.FLOAT8E4M3FN), (scale, ir.DataType.FLOAT)]
    codes, scale = formats.int4_quantize(weight, group)
    return [(codes, ir.DataType.UINT8), (scale, ir.DataType.from_numpy(scale.dtype))]


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize(
    ("weight_format", "group"), [("float", 0), ("fp8", 0), ("int4", 32), ("int4", 64), ("w4a8", 32)]
)
def test_agrees_with_reference(name: str, weight_format: WeightFormat, group: int, tmp_path: Path) -> None:
    expert_ids, experts = ROUTINGS[name]
    rng = np.random.default_rng(1)
    tokens, top_k = expert_ids.shape
    inputs = {
        "hidden": rng.standard_normal((tokens, WIDTH), dtype=np.float32),
        "expert_ids": expert_ids.astype(np.int32),
        "expert_weights": rng.random((tokens, top_k), dtype=np.float32),
    }
    shapes = {"gate_up": (experts, 2 * INNER, WIDTH), "down": (experts, WIDTH, INNER)}
    made = {
        key: packed(rng.standard_normal(shape) / shape[-1] ** 0.5, weight_format, group)
        for key, shape in shapes.items()
    }
    weights = {key: parts[0] for key, parts in made.items()}
    weights |= {f"{key}_scale": parts[1] for key, parts in made.items() if len(parts) > 1}
    attributes = {"activation": "gelu_tanh", "weight_format": weight_format, "group_size": group}
    actual = run_node("MixtureOfExperts", inputs, tmp_path, weights, **attributes)
    tensors = [torch.from_numpy(array) for array in (*inputs.values(), *(array for array, _ in weights.values()))]
    scales = tensors[5:] or [None, None]
    expected = mixture_of_experts(*tensors[:5], *scales, weight_format, group).numpy()
    # Both sum up to 96 terms of unit size in float32. Where activations are rounded to E4M3, a sum that lies between
    # two codes may be rounded to either: one code in 16 of one term in 32.
    np.testing.assert_allclose(actual, expected, atol=4e-2 if weight_format == "w4a8" else 3e-6)
    if weight_format == "w4a8":
        assert np.abs(actual - expected).mean() < 1e-4


def test_stored_in_bf16_they_are_widened_group_by_group(tmp_path: Path) -> None:
    """The traced graph casts all experts of a layer at once; the engine must not."""
    from dgcompile.build.onnxruntime.engines import rewrite
    from dgcompile.contract import ONNX_DOMAIN
    from tests.build.cpu.rewritten import run, weights_in_file

    rng = np.random.default_rng(0)
    experts = 12
    numbers = {
        "gate_up": rng.standard_normal((experts, 2 * INNER, WIDTH)).astype(ml_dtypes.bfloat16),
        "down": rng.standard_normal((experts, WIDTH, INNER)).astype(ml_dtypes.bfloat16),
    }
    stored = weights_in_file(tmp_path, {name: (array, ir.DataType.BFLOAT16) for name, array in numbers.items()})
    inputs = {
        "hidden": rng.standard_normal((7, WIDTH), dtype=np.float32),
        "expert_ids": np.stack([rng.permutation(experts)[:2] for _ in range(7)]).astype(np.int32),
        "expert_weights": rng.random((7, 2), dtype=np.float32),
    }
    given_values = [
        ir.Value(
            name=name, shape=ir.Shape([None, array.shape[1]]), type=ir.TensorType(ir.DataType.from_numpy(array.dtype))
        )
        for name, array in inputs.items()
    ]
    casts = [ir.node("Cast", [value], attributes={"to": ir.DataType.FLOAT}) for value in stored.values()]
    for cast, value in zip(casts, stored.values(), strict=True):
        cast.outputs[0].shape, cast.outputs[0].type = value.shape, ir.TensorType(ir.DataType.FLOAT)
    attributes = {"activation": "gelu_tanh", "weight_format": "float", "group_size": 0}
    node = ir.node(
        "MixtureOfExperts",
        [*given_values, *(cast.outputs[0] for cast in casts)],
        domain=ONNX_DOMAIN,
        attributes=attributes,
        name="node",
    )
    node.outputs[0].name, node.outputs[0].type = "output", given_values[0].type
    graph = ir.Graph(
        given_values,
        node.outputs,
        nodes=[*casts, node],
        initializers=list(stored.values()),
        opset_imports={"": 21, ONNX_DOMAIN: 1},
    )
    model = ir.Model(graph, ir_version=10)
    rewrite("encoder", model)
    whole = [
        value.shape for node in model.graph if node.op_type == "Cast" for value in node.inputs if value is not None
    ]
    assert all(shape is None or len(shape) < 3 or shape[0] < experts for shape in whole)
    tensors = [torch.from_numpy(array) for array in inputs.values()]
    tensors += [torch.from_numpy(array.astype(np.float32)) for array in numbers.values()]
    np.testing.assert_allclose(
        run(model, tmp_path, inputs)[0], mixture_of_experts(*tensors).numpy(), rtol=1e-4, atol=1e-3
    )


@given(experts=st.integers(1, 200), most=st.integers(1, 20))
def test_groups_cover_all_experts(experts: int, most: int) -> None:
    groups = groups_of(experts, most)
    assert len(groups) == min(most, experts) and groups[0][0] == 0 and groups[-1][1] == experts
    assert all(end == first for (_, end), (first, _) in pairwise(groups))
    sizes = [end - first for first, end in groups]
    assert max(sizes) - min(sizes) <= 1 and min(sizes) >= 1


def test_no_more_groups_than_said() -> None:
    assert len(groups_of(128)) == MOST_GROUPS
