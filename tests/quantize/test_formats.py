"""Number formats: what is packed comes back, kernels and onnxruntime read the same bytes, rounding is the best one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper
from safetensors.torch import load_file

from dgcompile.plugins.moe import formats as kernel_formats
from dgcompile.quantize import formats
from dgcompile.quantize.formats import FORMATS, SCALE
from dgcompile.recipe import weight_class
from dgcompile.safetensors_file import DTYPE_BITS, tensor_nbytes

CASES = [("fp32", 0), ("bf16", 0), ("fp8", 0), ("int8", 0), ("int4", 32), ("int4", 64)]
SHAPES = {"dense": (6, 192), "experts": (3, 5, 128)}


def random_weight(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Weights with a few large ones, as trained ones have."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator).square().add(0.01)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(("name", "group"), CASES)
def test_parts_are_as_planned(name: Any, group: int, shape: tuple[int, ...]) -> None:
    weight = random_weight(shape)
    made = FORMATS[name].encode(weight, group, "BF16")
    planned = FORMATS[name].parts(shape, group, "BF16")
    assert {suffix: tuple(part.shape) for suffix, part in made.items()} == {s: p.shape for s, p in planned.items()}
    assert sum(part.nbytes for part in made.values()) == sum(tensor_nbytes(*part) for part in planned.values())
    # What the build compares the file with is arithmetic of its own.
    exact = math.prod(shape) * FORMATS[name].bits(shape, group, DTYPE_BITS["BF16"]) / 8
    assert sum(part.nbytes for part in made.values()) == exact


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(CASES),
    st.sampled_from([(2,), ()]),
    st.integers(1, 9),
    st.integers(1, 3),
    st.integers(0, 10**6),
    st.sampled_from(["F32", "BF16"]),
)
def test_quantizing_again_changes_nothing(
    case: tuple[Any, int], outer: tuple[int, ...], rows: int, blocks: int, seed: int, scale_dtype: str
) -> None:
    name, group = case
    weight = random_weight((*outer, rows, 64 * blocks), seed)
    first = FORMATS[name].encode(weight, group, scale_dtype)
    values = FORMATS[name].decode(first, group)
    assert values.shape == weight.shape
    again = FORMATS[name].encode(values, group, scale_dtype)
    torch.testing.assert_close(FORMATS[name].decode(again, group), values, rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(("name", "group"), CASES)
def test_slices_give_the_same_bytes(name: Any, group: int, shape: tuple[int, ...]) -> None:
    weight = random_weight(shape).bfloat16()
    whole = FORMATS[name].encode(weight, group, "BF16")
    slices = [FORMATS[name].encode(piece, group, "BF16") for piece in weight.split(2)]
    for suffix, part in whole.items():
        joined = torch.cat([piece[suffix].view(torch.uint8) for piece in slices])
        assert torch.equal(joined, part.view(torch.uint8))


@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("chunk", [1 << 18, 300])
def test_experts_are_what_the_kernels_unpack(group: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "_CHUNK", chunk)
    weight = random_weight((3, 5, 192))
    int4 = FORMATS["int4"].encode(weight, group, "BF16")
    unpacked = kernel_formats.int4_dequantize(int4[""].numpy(), int4[SCALE].numpy(), 192, group)
    np.testing.assert_array_equal(unpacked.astype(np.float32), FORMATS["int4"].decode(int4, group).numpy())
    fp8 = FORMATS["fp8"].encode(weight, 0, "BF16")
    unpacked = kernel_formats.fp8_dequantize(fp8[""].view(torch.uint8).numpy(), fp8[SCALE].numpy())
    np.testing.assert_array_equal(unpacked.astype(np.float32), FORMATS["fp8"].decode(fp8, 0).numpy())


@pytest.mark.parametrize(("name", "group"), [("fp8", 0), ("int8", 0), ("int4", 32), ("int4", 64), ("int4", 128)])
def test_dense_weights_are_what_onnxruntime_dequantizes(name: Any, group: int) -> None:
    shape = (7, 256)
    parts = FORMATS[name].encode(random_weight(shape), group, "F32")
    element = {"fp8": TensorProto.FLOAT8E4M3FN, "int8": TensorProto.INT8, "int4": TensorProto.INT4}[name]
    codes, scale = parts[""].view(torch.uint8).numpy().tobytes(), parts[SCALE].numpy()
    options = {"axis": 1, "block_size": group} if group else {"axis": 0}
    graph = helper.make_graph(
        [helper.make_node("DequantizeLinear", ["w", "s"], ["y"], **options)],
        "dequantize",
        [],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [
            helper.make_tensor("w", element, shape, codes, raw=True),
            helper.make_tensor("s", TensorProto.FLOAT, scale.shape, scale.tobytes(), raw=True),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(model)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_array_equal(session.run(None, {})[0], FORMATS[name].decode(parts, group).numpy())


@pytest.mark.parametrize("group", [32, 64])
def test_no_group_is_worse_than_rounded_to_nearest(group: int) -> None:
    weight = random_weight((4, 8, 192), 5)
    searched = FORMATS["int4"].decode(FORMATS["int4"].encode(weight, group, "F32"), group)
    nearest = torch.from_numpy(
        kernel_formats.int4_dequantize(*kernel_formats.int4_quantize(weight.numpy(), group), 192, group)
    )

    def errors(values: torch.Tensor) -> torch.Tensor:
        return (values - weight).square().unflatten(-1, (-1, group)).sum(-1)

    assert bool((errors(searched) <= errors(nearest) * (1 + 1e-6)).all())
    assert errors(searched).sum() < 0.95 * errors(nearest).sum()


def test_no_channel_in_e4m3_is_worse_than_with_its_largest_at_448() -> None:
    weight = random_weight((40, 128), 6)
    searched = FORMATS["fp8"].decode(FORMATS["fp8"].encode(weight, 0, "F32"), 0)
    plain = torch.from_numpy(kernel_formats.fp8_dequantize(*kernel_formats.fp8_quantize(weight.numpy())))
    errors = [(values - weight).square().sum(-1) for values in (searched, plain)]
    assert bool((errors[0] <= errors[1] * (1 + 1e-6)).all())
    assert errors[0].sum() < 0.95 * errors[1].sum()


@pytest.mark.parametrize(("name", "group"), CASES)
def test_values_that_hurt(name: Any, group: int) -> None:
    """An all-zero expert, a matrix 1,000 times larger than its neighbour, subnormal weights, one weight in a row."""
    weight = random_weight((5, 4, 128))
    weight[0] = 0
    weight[1] *= 1000
    weight[2] = 1e-40 if name != "int4" else 1e-5
    weight[3] = 0
    weight[3, 1, 70] = -3.0
    values = FORMATS[name].decode(FORMATS[name].encode(weight, group, "BF16"), group)
    assert bool(values.isfinite().all())
    assert not values[0].any()
    assert float(values[2].abs().max()) < 1.1e-5
    torch.testing.assert_close(values[3], weight[3], rtol=1e-3, atol=0)
    # Each matrix keeps its own precision.
    for expert in (1, 4):
        error = (values[expert] - weight[expert]).norm() / weight[expert].norm()
        assert error < {"fp32": 1e-9, "bf16": 3e-3, "fp8": 0.04, "int8": 0.02, "int4": 0.2}[name]


def test_weights_beyond_a_format_are_refused() -> None:
    experts = torch.full((1, 2, 64), 1e6)
    with pytest.raises(ValueError, match=r"weights up to 1e\+06 are too large for INT4 scales"):
        FORMATS["int4"].encode(experts, 32, "BF16")
    assert torch.equal(FORMATS["int4"].decode(FORMATS["int4"].encode(experts[0], 32, "F32"), 32).round(), experts[0])
    with pytest.raises(ValueError, match=r"too large for torch\.bfloat16"):
        FORMATS["bf16"].encode(torch.tensor([[3.4e38]]), 0, "BF16")


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e20, 1e30])
@pytest.mark.parametrize(("name", "group"), [("fp8", 0), ("int8", 0), ("int4", 64)])
def test_the_size_of_dense_weights_does_not_matter(name: Any, group: int, size: float) -> None:
    weight = random_weight((4, 128))
    values = FORMATS[name].decode(FORMATS[name].encode(weight * size, group, "BF16"), group) / size
    assert float((values - weight).norm() / weight.norm()) < {"fp8": 0.04, "int8": 0.02, "int4": 0.2}[name]


def test_experts_that_are_too_small_for_their_scales_are_refused() -> None:
    weight = random_weight((3, 4, 64))
    weight[1] *= 1e-7
    with pytest.raises(ValueError, match="too small for INT4 scales in float16"):
        FORMATS["int4"].encode(weight, 32, "BF16")
    weight[1] = 0
    FORMATS["int4"].encode(weight, 32, "BF16")


EXAMPLE = Path(__file__).parents[2] / "examples" / "sudoku" / "model.safetensors"


@pytest.mark.parametrize(
    ("name", "group", "kind", "bound"),
    [
        # Relative errors of the trained example's weights, with 5 % to spare: worse ones would cost more than the
        # figures of docs/accuracy.md say.
        ("fp8", 0, "experts", 0.0238),
        ("fp8", 0, "dense_mlp", 0.0242),
        ("int8", 0, "attention", 0.0069),
        ("int4", 32, "experts", 0.096),
        ("int4", 64, "experts", 0.105),
    ],
)
def test_trained_weights_lose_no_more_than_they_did(name: Any, group: int, kind: str, bound: float) -> None:
    lost = total = 0.0
    for key, weight in load_file(EXAMPLE).items():
        try:
            wanted = weight_class(key) == kind
        except ValueError:
            continue  # of the vision tower
        if wanted:
            values = FORMATS[name].decode(FORMATS[name].encode(weight, group, "BF16"), group)
            lost += float((values - weight.float()).square().sum())
            total += float(weight.float().square().sum())
    assert 0.5 * bound < (lost / total) ** 0.5 < bound
