"""Random weights that are not bland, for the random checkpoints of every size."""

from __future__ import annotations

import torch

from tests.model_config import EOS


def scaled(
    name: str, noise: torch.Tensor, hidden: int, final_norm: tuple[float, float], first_row: int = 0
) -> torch.Tensor:
    """Turns standard normal ``noise`` into a weight of its class.

    The scales were found by trial: residual contributions near one third of the stream keep a token's own embedding
    visible in its logits (so canvases can settle), and embedding rows of different lengths make some tokens sure and
    others unsure of themselves (so canvases take several steps to settle).

    Args:
        name: of the stored tensor.
        noise: as many numbers as the weight has, or rows of its leading axis, in float32.
        hidden: hidden size of the model.
        final_norm: mean and standard deviation of the last norm's weight, which is the scale of the logits.
        first_row: which row of the weight the first of ``noise`` is.
    """
    if "vision" in name:
        return noise.mul(0.1)
    if name.endswith("embed_tokens.weight"):
        lengths = torch.exp(0.3 * noise[:, :1])
        # A rare end keeps most rows running over several canvases while some still end early.
        if first_row <= EOS < first_row + len(noise):
            lengths[EOS - first_row] = 0.9
        return noise.mul(lengths * hidden**-0.5)
    if name.endswith("decoder.norm.weight"):
        mean, deviation = final_norm
        return mean + deviation * noise
    if name.endswith("layer_scalar"):
        return 1.0 + 0.15 * noise
    if name.endswith("per_expert_scale"):
        return torch.exp(0.3 * noise)
    if name.endswith("router.scale"):
        return 1.0 + 0.2 * noise
    if name.endswith("router.proj.weight"):
        return noise.mul(1.5)
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        # Attention has scale 1: scores of a few units keep it between uniform and one-hot.
        return noise.mul(0.2).add(1.3).mul(noise.numel() ** -0.25)
    if name.endswith(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")):
        return 0.35 + 0.1 * noise
    if name.endswith("norm.weight") or "layernorm" in name:
        return 1.0 + 0.2 * noise
    return noise.mul(noise.shape[-1] ** -0.5)
