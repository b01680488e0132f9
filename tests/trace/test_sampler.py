"""The sampler against transformers' own, and its draw against an exact inverse CDF."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    EntropyBoundSampler,
    EntropyBoundSamplerConfig,
)

from dgcompile.trace.sampler import accept, block_size, denoising_sample, draw


def exact_draw(probabilities: np.ndarray, uniform: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Inverse CDF in float64: tokens [B, L], and how far each uniform number is from the next change of token."""
    cumulative = probabilities.astype(np.float64).cumsum(-1)
    target = uniform[..., None].astype(np.float64) * cumulative[..., -1:]
    tokens = (cumulative <= target).sum(-1)
    margin = np.abs(cumulative - target).min(-1)
    return np.minimum(tokens, probabilities.shape[-1] - 1), margin


@pytest.mark.parametrize("vocab", [2, 7, 64, 1000, 32768, 262144])
@pytest.mark.parametrize("peak", [0.0, 1.0, 30.0])
def test_draw_is_the_inverse_cdf(vocab: int, peak: float) -> None:
    rng = np.random.default_rng(vocab)
    logits = torch.from_numpy(rng.standard_normal((1, 64, vocab), dtype=np.float32) * peak)
    probabilities = logits.softmax(-1)
    uniform = rng.random((1, 64), dtype=np.float32)
    tokens = draw(probabilities, torch.from_numpy(uniform)).numpy()
    expected, margin = exact_draw(probabilities.numpy(), uniform)
    # Two fp32 sums of sqrt(V) terms each: an error of about 1e-7. Closer to a boundary than that either side is right.
    decided = margin > 1e-6
    assert decided.mean() > 0.9 or vocab > 100_000
    np.testing.assert_array_equal(tokens[decided], expected[decided])
    assert np.abs(tokens - expected).max() <= 1


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), vocab=st.integers(1, 70), zeros=st.floats(0, 0.95))
def test_draw_never_takes_a_token_of_probability_zero(seed: int, vocab: int, zeros: float) -> None:
    rng = np.random.default_rng(seed)
    weights = rng.random((1, 40, vocab), dtype=np.float32) * (rng.random((1, 40, vocab)) > zeros)
    weights[..., rng.integers(vocab)] += 0.1
    probabilities = torch.from_numpy((weights / weights.sum(-1, keepdims=True)).astype(np.float32))
    uniform = rng.random((1, 40), dtype=np.float32)
    uniform[0, :2] = 0.0, np.nextafter(np.float32(1), np.float32(0))  # the ends of [0, 1)
    tokens = draw(probabilities, torch.from_numpy(uniform))
    assert (probabilities.gather(-1, tokens[..., None]) > 0).all()


@pytest.mark.parametrize("vocab", [1, 2, 3, 64, 65, 32768, 262144])
def test_block_size_balances_both_levels(vocab: int) -> None:
    size = block_size(vocab)
    assert size * size >= vocab
    assert size * size < 8 * max(vocab, 2)


def transformers_step(
    logits: torch.Tensor, tokens: torch.Tensor, canvas: torch.Tensor, bound: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accepted positions and accepted canvas by transformers' EntropyBoundSampler."""
    sampler = EntropyBoundSampler(EntropyBoundSamplerConfig(bound), canvas.shape[1], logits.shape[-1], 48)
    accepted_canvas = sampler.accept_canvas(canvas, tokens, logits, 1)
    assert sampler.accepted_token_mask is not None
    return sampler.accepted_token_mask, accepted_canvas


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), bound=st.sampled_from([1e-3, 0.1, 2.0, 50.0]), peak=st.floats(0.5, 12))
def test_acceptance_is_that_of_transformers(seed: int, bound: float, peak: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.rand(2, 24, 1, generator=generator) * peak * 3
    logits = torch.randn(2, 24, 50, generator=generator) * scale
    canvas = torch.randint(50, (2, 24), generator=generator)
    output = denoising_sample(
        logits,
        torch.ones(2),
        torch.full((2,), bound),
        torch.rand(2, 24, generator=generator),
        torch.full((2, 24), -1, dtype=torch.int32),
        torch.randn(50, 8, generator=generator),
        torch.tensor(2.0),
    )
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    exact = torch.distributions.Categorical(logits=logits.double()).entropy()
    torch.testing.assert_close(output.entropy.double(), exact, atol=1e-6, rtol=1e-5)
    # transformers subtracts the log of the sum from logits of up to 100, whose own rounding is 4e-6.
    torch.testing.assert_close(output.entropy, entropy, atol=1e-5, rtol=1e-5)
    expected, _ = transformers_step(logits, canvas, canvas, bound)
    ordered = entropy.double().sort(dim=-1).values
    sums = ordered.cumsum(-1) - ordered
    if (sums - bound).abs().min() > 1e-4:  # no position lies within rounding of the bound
        assert torch.equal(output.accepted, expected)
    assert torch.equal(output.next_canvas_ids == -1, ~output.accepted)


def test_equal_entropies_are_ordered_by_position() -> None:
    entropy = torch.full((1, 6), 0.04)
    # 0, 0.04, 0.08 lie within 0.1; the fourth would see 0.12 before it.
    assert accept(entropy, torch.tensor([0.1])).tolist() == [[True, True, True, False, False, False]]


def test_the_most_certain_position_is_always_accepted() -> None:
    entropy = torch.tensor([[5.0, 3.0, 4.0]])
    assert accept(entropy, torch.tensor([1e-9])).tolist() == [[False, True, False]]


def test_rows_have_their_own_temperature_and_bound() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 10, 30, generator=generator).expand(2, 10, 30) * 4
    uniform = torch.rand(1, 10, generator=generator).expand(2, 10)
    noise = torch.zeros(2, 10, dtype=torch.int32)
    table, scale = torch.randn(30, 4, generator=generator), torch.tensor(1.5)
    both = denoising_sample(logits, torch.tensor([0.4, 0.8]), torch.tensor([0.1, 5.0]), uniform, noise, table, scale)
    for row, (temperature, bound) in enumerate([(0.4, 0.1), (0.8, 5.0)]):
        alone = denoising_sample(
            logits[:1], torch.tensor([temperature]), torch.tensor([bound]), uniform[:1], noise[:1], table, scale
        )
        for name in alone._fields:
            torch.testing.assert_close(getattr(both, name)[row], getattr(alone, name)[0])
        soft = (logits[0] / temperature).softmax(-1) @ table * 1.5
        torch.testing.assert_close(both.next_self_conditioning[row], soft, atol=1e-5, rtol=1e-5)
    assert both.entropy[0].mean() < both.entropy[1].mean()
