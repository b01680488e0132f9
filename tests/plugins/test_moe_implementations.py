"""The four implementations of MixtureOfExperts in every number format of the weights.

The torch operator, the ONNX function in onnxruntime and the kernels in Triton's interpreter get the same packed bytes;
the float64 reference gets the weights that these stand for.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import library

from dgcompile.plugins.moe import formats, torch_weights
from dgcompile.plugins.moe.formats import WeightFormat
from dgcompile.plugins.moe.reference import mixture_of_experts as reference
from dgcompile.plugins.moe.torch_op import mixture_of_experts as torch_op
from tests.trace.onnx_node import run_node

Arrays = dict[str, np.ndarray]

# Widths: 80 is one and a quarter blocks of INT4, 40 less than one; 96 and 64 fill groups and, the latter, a block.
TOKENS, TOP_K, EXPERTS = 19, 3, 4
WIDTHS = [(80, 40), (96, 64)]
FORMATS: list[tuple[WeightFormat, int]] = [
    ("float", 0),
    ("fp8", 0),
    ("int4", 32),
    ("int4", 64),
    ("w4a8", 32),
    ("w4a8", 64),
]
VALUES = ["zeros among them", "a gate 1000 times larger", "activations of 1e5"]

# Error of a token's output over that output's norm. float32: sums of up to 96 terms, each rounded by 2**-24. float16:
# the inner activations, each expert's result and the output are rounded by 2**-11; where choices cancel, it shows more.
BOUNDS = {"float32": 3e-6, "float16": 4e-3}
# Rounding to E4M3 makes a jump of up to 2**-3 out of a difference in the last place, in one of 40 or more inner
# activations: rarely in float32, in most rows in float16.
JUMP = 6e-2
ROWS_WITH_JUMPS = {"float32": 2, "float16": TOKENS}


def pack(weight: np.ndarray, weight_format: WeightFormat, group: int) -> tuple[np.ndarray, np.ndarray | None]:
    if weight_format == "float":
        return weight, None
    return formats.fp8_quantize(weight) if weight_format == "fp8" else formats.int4_quantize(weight, group)


def case(
    weight_format: WeightFormat, group: int, values: str, dtype: str = "float32", widths: tuple[int, int] = WIDTHS[0]
) -> tuple[Arrays, Arrays]:
    """Inputs of the node by name, and the two weights that the packed ones stand for."""
    rng = np.random.default_rng(4)
    width, inner = widths
    hidden = rng.standard_normal((TOKENS, width))
    gate_up = rng.standard_normal((EXPERTS, 2 * inner, width)) / width**0.5
    down = rng.standard_normal((EXPERTS, width, inner)) / inner**0.5
    if values == "zeros among them":
        hidden[7] = 0  # as the self-conditioning signal is at first
        gate_up[2] = down[2] = 0
        gate_up[1, 5] = 0
    elif values == "a gate 1000 times larger":
        gate_up[:, :inner] *= 1000
    elif values == "activations of 1e5":
        hidden[::4] *= 1e5
    arrays = {
        "hidden": hidden.astype(dtype),
        "expert_ids": np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(TOKENS)]).astype(np.int32),
        "expert_weights": rng.random((TOKENS, TOP_K), dtype=np.float32),
    }
    weights = {"gate_up": gate_up.astype(dtype), "down": down.astype(dtype)}
    packed = {name: pack(weight, weight_format, group) for name, weight in weights.items()}
    arrays |= {name: codes for name, (codes, _) in packed.items()}
    arrays |= {f"{name}_scale": scale for name, (_, scale) in packed.items() if scale is not None}
    for name, (codes, scale) in packed.items():
        if weight_format == "fp8":
            weights[name] = formats.fp8_dequantize(codes, scale)
        elif scale is not None:
            weights[name] = formats.int4_dequantize(codes, scale, weights[name].shape[-1], group)
    return arrays, weights


def expected(weight_format: WeightFormat, arrays: Arrays, weights: Arrays) -> np.ndarray:
    rounding = [formats.fp8_round_rows] if weight_format == "w4a8" else []
    inputs = (arrays[name] for name in ("hidden", "expert_ids", "expert_weights"))
    return reference(*inputs, weights["gate_up"], weights["down"], *rounding)


def check(actual: np.ndarray, exact: np.ndarray, weight_format: WeightFormat, dtype: str) -> None:
    norms = np.linalg.norm(exact, axis=1)
    np.testing.assert_array_equal(actual[norms == 0], 0)
    used = norms > 0
    errors = np.linalg.norm(actual[used].astype(np.float64) - exact[used], axis=1) / norms[used]
    assert np.isfinite(errors).all()
    if weight_format == "w4a8":
        assert np.count_nonzero(errors > BOUNDS[dtype]) <= ROWS_WITH_JUMPS[dtype], errors
        assert errors.max() < JUMP, errors
    else:
        assert errors.max() < BOUNDS[dtype], errors


def in_torch(weight_format: WeightFormat, group: int, arrays: Arrays) -> np.ndarray:
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    output: torch.Tensor = torch_op(**tensors, weight_format=weight_format, group_size=group)
    return output.numpy()


def in_onnxruntime(weight_format: WeightFormat, group: int, arrays: Arrays) -> np.ndarray:
    return run_node(
        "MixtureOfExperts",
        arrays,
        weight_format=weight_format,
        e4m3=("gate_up", "down") if weight_format == "fp8" else (),
        activation="gelu_tanh",
        group_size=group,
    )


def kernel_cases() -> list[tuple[WeightFormat, int, str, str]]:
    """Format, group, values, dtype. float16 ends at 65504; bf16 is not run, the interpreter computes it wrongly."""
    return [
        (*number_format, values, dtype)
        for number_format, values, dtype in product(FORMATS, VALUES, BOUNDS)
        if dtype == "float32" or values == VALUES[0]
    ]


@pytest.fixture(scope="module")
def from_kernels(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Outputs of the kernels by case, from a process of its own: once loaded, triton either interprets or compiles."""
    if find_spec("triton") is None:
        pytest.skip("triton (extra `build`) is not installed: NO kernel is tested")
    path = tmp_path_factory.mktemp("kernels") / "outputs.npz"
    command = [sys.executable, "-m", "tests.plugins.test_moe_implementations", str(path)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return np.load(path)


def write_outputs_of_kernels(path: Path) -> None:
    from dgcompile.plugins.moe.launch import Tile
    from dgcompile.plugins.moe.torch_call import mixture_of_experts

    tile = Tile(block_m=16, block_n=64, block_k=32, warps=4, stages=1)
    outputs: dict[str, Any] = {}
    for weight_format, group, values, dtype in kernel_cases():
        arrays, _ = case(weight_format, group, values, dtype)
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        output = mixture_of_experts(**tensors, tile=tile, weight_format=weight_format, group_size=group)
        outputs[f"{weight_format} {group} {values} {dtype}"] = output.numpy()
    np.savez(path, **outputs)


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize(("weight_format", "group"), FORMATS)
def test_torch_and_onnxruntime_agree_with_the_reference(weight_format: WeightFormat, group: int, values: str) -> None:
    for widths in WIDTHS:
        arrays, weights = case(weight_format, group, values, widths=widths)
        exact = expected(weight_format, arrays, weights)
        check(in_torch(weight_format, group, arrays), exact, weight_format, "float32")
        check(in_onnxruntime(weight_format, group, arrays), exact, weight_format, "float32")


@pytest.mark.parametrize(("weight_format", "group", "values", "dtype"), kernel_cases())
def test_kernels_agree_with_the_reference(
    from_kernels: Any, weight_format: WeightFormat, group: int, values: str, dtype: str
) -> None:
    arrays, weights = case(weight_format, group, values, dtype)
    exact = expected(weight_format, arrays, weights)
    check(from_kernels[f"{weight_format} {group} {values} {dtype}"], exact, weight_format, dtype)


@pytest.mark.parametrize(("weight_format", "group"), FORMATS)
def test_torch_rounds_to_float16_where_the_kernels_do(
    from_kernels: Any, weight_format: WeightFormat, group: int
) -> None:
    """float16 in both, sums float32: what is near a tie may differ by one place; a jump in E4M3 moves a whole row."""
    arrays, weights = case(weight_format, group, VALUES[0], "float16")
    actual = in_torch(weight_format, group, arrays)
    kernel = from_kernels[f"{weight_format} {group} {VALUES[0]} float16"]
    check(actual, expected(weight_format, arrays, weights), weight_format, "float16")
    if weight_format != "float":  # which torch computes with roundings of its own
        assert np.mean(actual == kernel) > (0.9 if weight_format == "w4a8" else 0.97)


def test_the_formats_differ() -> None:
    """Or the tests above would compare one and the same thing."""
    outputs = []
    for weight_format, group in FORMATS:
        arrays, _ = case(weight_format, group, VALUES[0])
        outputs.append(in_torch(weight_format, group, arrays))
    for index, one in enumerate(outputs):
        for other in outputs[:index]:
            assert np.linalg.norm(one - other) > 1e-2 * np.linalg.norm(one)


@pytest.mark.parametrize(("weight_format", "group"), FORMATS[1:])
@pytest.mark.parametrize("places", [1, 32, 40, 64, 80, 128])
def test_torch_weights_are_those_of_numpy(weight_format: WeightFormat, group: int, places: int) -> None:
    weight = np.random.default_rng(places).standard_normal((2, 5, places)).astype(np.float32)
    codes, scale = pack(weight, weight_format, group)
    assert scale is not None
    packed, scales = torch_weights.empty_packed(torch.from_numpy(weight), weight_format, group)
    assert packed.shape == codes.shape and packed.itemsize == codes.itemsize
    assert scales.shape == scale.shape and scales.numpy().dtype == scale.dtype
    unpacked = torch_weights.dequantize(
        torch.from_numpy(codes[1]), torch.from_numpy(scale[1]), weight_format, group, places
    )
    exact = (
        formats.fp8_dequantize(codes[1], scale[1])
        if weight_format == "fp8"
        else formats.int4_dequantize(codes[1], scale[1], places, group)
    )
    np.testing.assert_array_equal(unpacked.numpy(), exact.astype(np.float32))


def test_torch_rounds_rows_as_numpy_does() -> None:
    rows = np.random.default_rng(0).standard_normal((6, 300)).astype(np.float32)
    rows[1] = 0
    rows[2] *= 1e30
    rows[3] *= 1e-38  # subnormal numbers, and a scale that is one of the smallest
    rows[5] = 0
    rows[5, 0] = 2**-149  # too small for a scale
    rows[4] *= np.exp(np.linspace(-20, 0, 300))
    rounded = torch_weights.round_rows(torch.from_numpy(rows)).numpy()
    # Codes are chosen by quotients in float32 here, in float64 there: none of these is within rounding of a tie.
    np.testing.assert_array_equal(rounded[5], 0)
    np.testing.assert_allclose(rounded[:5], formats.fp8_round_rows(rows[:5]), rtol=2**-23, atol=2**-149)


@pytest.mark.parametrize(("weight_format", "group"), [FORMATS[0], FORMATS[2]])
def test_the_operator_is_one_that_torch_can_trace(weight_format: WeightFormat, group: int) -> None:
    arrays, _ = case(weight_format, group, VALUES[0])
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    keywords = {**tensors, "weight_format": weight_format, "group_size": group}
    library.opcheck(torch_op, (), keywords, test_utils=("test_schema", "test_faketensor"))


if __name__ == "__main__":
    write_outputs_of_kernels(Path(sys.argv[1]))
