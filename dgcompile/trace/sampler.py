"""The sampler of one denoising step, as part of the denoiser graph: logits in, next canvas out.

The rules are those of transformers' ``EntropyBoundSampler`` (entropy bound: Ben-Hamu et al., arXiv 2505.24857). What
differs is where the randomness comes from: the host sends one uniform number and one noise token per position, so that
every backend draws the same tokens and no [canvas, vocab] noise exists.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class SamplerOutput(NamedTuple):
    """One denoising step's result; fields are the denoiser graph's outputs."""

    next_canvas_ids: Tensor  # i32 [B, L]
    argmax_ids: Tensor  # i32 [B, L]
    next_self_conditioning: Tensor  # [B, L, H]
    accepted: Tensor  # bool [B, L]
    entropy: Tensor  # f32 [B, L], nats


def block_size(vocab_size: int) -> int:
    """Block size of the two-level draw: the power of two nearest above the root, so that both levels cost the same."""
    return 1 << (max(vocab_size - 1, 1).bit_length() + 1) // 2


def _pick(weights: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """First index whose cumulative weight exceeds ``target``, and the sum of the weights before it.

    Args:
        weights: [..., n], not negative.
        target: [..., 1], in [0, sum of weights); rounding may lift it to the sum, then the last index with weight is
            taken, never one of weight zero behind it.

    Returns:
        index [..., 1] (int64) and sum before it [..., 1].
    """
    cumulative = weights.cumsum(dim=-1)
    beyond = (cumulative <= target).sum(dim=-1, keepdim=True)
    last = (cumulative < cumulative[..., -1:]).sum(dim=-1, keepdim=True)
    index = torch.minimum(beyond, last)
    before = torch.where(index > 0, cumulative.gather(-1, (index - 1).clamp(min=0)), torch.zeros_like(target))
    return index, before


def draw(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Samples one token per position by inverse CDF in two levels: a block of the vocabulary, then a token in it.

    One flat cumulative sum over the vocabulary would lose enough of fp32 to move samples to a neighbour; two sums of
    about sqrt(V) terms do not.

    Args:
        probabilities: f32 [B, L, V], not negative; need not sum to exactly one.
        uniform: f32 [B, L] in [0, 1).

    Returns:
        int64 [B, L].
    """
    batch, canvas, vocab = probabilities.shape
    size = block_size(vocab)
    blocks = -(-vocab // size)
    padded = torch.nn.functional.pad(probabilities, (0, blocks * size - vocab)) if vocab % size else probabilities
    table = padded.reshape(batch, canvas, blocks, size)
    sums = table.sum(dim=-1)  # [B, L, blocks]
    target = uniform[..., None] * sums.sum(dim=-1, keepdim=True)  # [B, L, 1]
    block, before = _pick(sums, target)
    chosen = table.gather(2, block[..., None].expand(batch, canvas, 1, size)).squeeze(2)  # [B, L, size]
    token, _ = _pick(chosen, target - before)
    return (block * size + token).squeeze(-1)


def accept(entropy: Tensor, entropy_bound: Tensor) -> Tensor:
    """Which positions keep their sampled token: the most certain ones, while the others' entropies stay in the bound.

    A position is accepted when the entropies of all more certain positions sum to at most the bound (the bound's left
    side, cumulative sum minus own entropy). Written as a comparison of all pairs instead of a sort, since L is a few
    hundred and every backend has it; equal entropies are ordered by position.

    Args:
        entropy: f32 [B, L]; entropy_bound: f32 [B].

    Returns:
        bool [B, L].
    """
    canvas = entropy.shape[-1]
    position = torch.arange(canvas, device=entropy.device)
    own, other = entropy[:, :, None], entropy[:, None, :]  # [B, L, 1], [B, 1, L]
    earlier = position[None, :] < position[:, None]  # [L, L]
    more_certain = (other < own) | ((other == own) & earlier)
    before = torch.where(more_certain, other, torch.zeros_like(other)).sum(dim=-1)  # [B, L]
    return before <= entropy_bound[:, None]


def denoising_sample(
    logits: Tensor,
    temperature: Tensor,
    entropy_bound: Tensor,
    uniform: Tensor,
    noise_ids: Tensor,
    embedding: Tensor,
    embed_scale: Tensor,
) -> SamplerOutput:
    """From the softcapped logits to everything that the next denoising step needs.

    Args:
        logits: f32 [B, L, V], already softcapped.
        temperature, entropy_bound: f32 [B].
        uniform: f32 [B, L] in [0, 1).
        noise_ids: i32 [B, L], the tokens that replace positions not accepted.
        embedding: [V, H]; embed_scale: scalar. Soft embeddings are ``softmax @ embedding * embed_scale``.
    """
    scaled = logits / temperature[:, None, None]
    shifted = scaled - scaled.amax(dim=-1, keepdim=True)  # <= 0
    weights = shifted.exp()
    total = weights.sum(dim=-1, keepdim=True)
    probabilities = weights / total
    # H = log sum e^z - sum p z, with z shifted by the maximum: exact where a position is nearly certain.
    entropy = (total.log() - (probabilities * shifted).sum(dim=-1, keepdim=True)).squeeze(-1)
    accepted = accept(entropy, entropy_bound)
    sampled = draw(probabilities, uniform).to(torch.int32)
    soft = torch.matmul(probabilities.to(embedding.dtype), embedding) * embed_scale.to(embedding.dtype)
    return SamplerOutput(
        next_canvas_ids=torch.where(accepted, sampled, noise_ids),
        argmax_ids=scaled.argmax(dim=-1).to(torch.int32),
        next_self_conditioning=soft,
        accepted=accepted,
        entropy=entropy,
    )
