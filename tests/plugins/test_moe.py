"""The torch operator and the ONNX function of MixtureOfExperts against the float64 reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dgcompile.plugins.moe.reference import mixture_of_experts as reference
from dgcompile.plugins.moe.torch_op import mixture_of_experts as torch_op
from tests.trace.onnx_node import run_node

# fp32 dot products of 24 and 10 unit-size terms, outputs of order 10: rounding near 1e-6 relative.
TOLERANCE = 1e-4


def case(expert_ids: np.ndarray, experts: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    tokens, top_k = expert_ids.shape
    return {
        "hidden": rng.standard_normal((tokens, 24), dtype=np.float32),
        "expert_ids": expert_ids.astype(np.int64),
        "expert_weights": rng.random((tokens, top_k), dtype=np.float32),
        "gate_up": rng.standard_normal((experts, 20, 24), dtype=np.float32),
        "down": rng.standard_normal((experts, 24, 10), dtype=np.float32),
    }


ROUTINGS = {
    "random": (np.stack([np.random.default_rng(t).permutation(8)[:2] for t in range(33)]), 8),
    "one token": (np.array([[3, 1]]), 4),
    "all on one pair": (np.tile([[6, 2]], (17, 1)), 8),
    "single expert": (np.zeros((5, 1), int), 1),
    "most experts empty": (np.array([[0, 15], [15, 0], [0, 14]]), 16),
    "all experts at once": (np.tile(np.arange(4), (9, 1)), 4),
}


@pytest.mark.parametrize("name", ROUTINGS)
def test_agrees_with_reference(name: str) -> None:
    arrays = case(*ROUTINGS[name])
    expected = reference(*arrays.values())
    actual = torch_op(*(torch.from_numpy(array) for array in arrays.values())).numpy()
    np.testing.assert_allclose(actual, expected, atol=TOLERANCE)
    attributes = {"activation": "gelu_tanh", "weight_format": "float", "group_size": 0}
    np.testing.assert_allclose(run_node("MixtureOfExperts", arrays, **attributes), expected, atol=TOLERANCE)


def test_a_weighted_sum_is_rounded_once() -> None:
    """In bf16 the weights stay float32 and so does the sum: eight experts that agree give what one of them gives."""
    arrays = case(np.tile(np.arange(8), (16, 1)), 8)
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    # One and the same expert eight times.
    for name in ("gate_up", "down"):
        tensors[name] = tensors[name][:1].expand(8, -1, -1).bfloat16()
    hidden = tensors["hidden"].bfloat16()
    weights = torch.full((16, 8), 0.1)
    once = torch_op(hidden, tensors["expert_ids"][:, :1], torch.ones(16, 1), tensors["gate_up"], tensors["down"])
    actual = torch_op(hidden, tensors["expert_ids"], weights, tensors["gate_up"], tensors["down"])
    assert torch.equal(actual, (once.float() * 0.8).bfloat16())


def test_a_values_gate_1000_times_larger_stays_finite() -> None:
    arrays = case(*ROUTINGS["random"])
    arrays["gate_up"][:, :10] *= 1000
    expected = reference(*arrays.values())
    actual = run_node("MixtureOfExperts", arrays)
    # Sums reach 1e4 and cancel: the bound is relative to the largest value, where the rounding comes from.
    np.testing.assert_allclose(actual, expected, atol=1e-6 * np.abs(expected).max() * 10)
