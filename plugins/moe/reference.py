"""What MixtureOfExperts computes, in float64, one token at a time: the yardstick for every other implementation."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.floating]


def gelu_tanh(values: FloatArray) -> npt.NDArray[np.float64]:
    """GELU in its tanh approximation (Hendrycks and Gimpel, arXiv 1606.08415), elementwise in float64."""
    wide = values.astype(np.float64)
    inner = np.sqrt(2.0 / np.pi) * (wide + 0.044715 * wide**3)
    return np.asarray(0.5 * wide * (1.0 + np.tanh(inner)), dtype=np.float64)


def mixture_of_experts(
    hidden: FloatArray,
    expert_ids: npt.NDArray[np.integer],
    expert_weights: FloatArray,
    gate_up: FloatArray,
    down: FloatArray,
    round_rows: Callable[[FloatArray], FloatArray] = lambda rows: rows,
) -> npt.NDArray[np.float64]:
    """Weighted sum of each token's experts: ``sum_k w_k * down_k (gelu(gate_k x) * up_k x)``.

    Args:
        hidden: [T, H].
        expert_ids: [T, K], the experts of each token.
        expert_weights: [T, K], their weights.
        gate_up: [E, 2 I, H], gate rows first.
        down: [E, H, I].
        round_rows: what the activations of one token lose before each product, where they are quantized.

    Returns:
        [T, H] in float64.
    """
    output = np.zeros(hidden.shape)
    for token, (experts, weights) in enumerate(zip(expert_ids, expert_weights, strict=True)):
        for expert, weight in zip(experts, weights, strict=True):
            gate, up = np.split(gate_up[expert].astype(np.float64) @ round_rows(hidden[token]).astype(np.float64), 2)
            inner = round_rows(gelu_tanh(gate) * up)
            output[token] += float(weight) * (down[expert].astype(np.float64) @ inner)
    return output
