"""The transformers model made traceable: attention and experts swapped for modules that call the custom operators.

Everything else (norms, router, MLP, rotary embedding, self-conditioning, softcap, residuals) is traced as transformers
runs it. The swap is by exact class, and refuses a transformers whose classes are not the ones this was written against.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import tokenize
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DiffusionGemmaForBlockDiffusion
from transformers import __version__ as transformers_version
from transformers.models.diffusion_gemma import modeling_diffusion_gemma as modeling

from dgcompile.errors import TraceError
from dgcompile.plugins.block_attention.torch_op import block_attention
from dgcompile.plugins.moe.formats import WeightFormat
from dgcompile.plugins.moe.torch_op import mixture_of_experts
from dgcompile.plugins.moe.torch_weights import empty_packed
from dgcompile.trace.sampler import SamplerOutput, denoising_sample

SUPPORTED_TRANSFORMERS = "5.24"

# sha256 over the tokens of each class's source: comments and layout do not count, any change of behaviour does.
_KNOWN_CLASSES = {
    "DiffusionGemmaEncoderTextAttention": "b5f26219becad37bb4be4175f8c6f3d80b113eb57058a6565b2482853d91051b",
    "DiffusionGemmaDecoderTextAttention": "f1017ae92ea9bb8e5cd793f7ee871606f22937cb569edfd004cf4b3840d715fb",
    "DiffusionGemmaTextExperts": "034bd6bbf45ce07dd7447a66dbfc478eb90c063c8d6a7cafb877acf22812aba8",
    "DiffusionGemmaSelfConditioning": "1c54093b28f8cb6c71c3a1e22cb0c876b19383b5d2b96913d672e960ffaf793c",
    "apply_rotary_pos_emb": "f6573201425c1680d6a3f85d5a263516b0ccb73e18508af9f11bf4e8b6314f59",
}


class PastKeyValues:
    """What the swapped attention modules find in place of a transformers cache: past rows in, new rows out."""

    def __init__(self, past_key_values: list[tuple[Tensor, Tensor]], past_length: Tensor) -> None:
        self.past_key_values = past_key_values
        self.past_length = past_length
        self.present: dict[int, tuple[Tensor, Tensor]] = {}


class BlockAttentionModule(nn.Module):
    """Attention of either mode through ``dgcompile.plugins.block_attention.torch_op``; owns its weights."""

    def __init__(self, original: Any, *, causal: bool) -> None:
        super().__init__()
        self.q_proj: nn.Linear = original.q_proj
        self.k_proj: nn.Linear = original.k_proj
        self.v_proj: nn.Linear | None = original.v_proj
        self.o_proj: nn.Linear = original.o_proj
        self.q_norm: nn.Module = original.q_norm
        self.k_norm: nn.Module = original.k_norm
        self.v_norm: nn.Module = original.v_norm
        self.layer_idx: int = original.layer_idx
        self.head_dim: int = original.head_dim
        self.scaling: float = original.scaling
        self.window: int = original.sliding_window or 0
        self.causal = causal

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], cache: PastKeyValues, **_: Any
    ) -> tuple[Tensor, None]:
        """hidden_states [B, N, H] -> (output [B, N, H], None); the block's keys and values go to ``cache.present``."""
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        cos, sin = position_embeddings

        def rotate(states: Tensor) -> Tensor:
            rotated: Tensor = modeling.apply_rotary_pos_emb(states, cos, sin, unsqueeze_dim=2)
            return rotated

        query = rotate(self.q_norm(self.q_proj(hidden_states).view(shape)))  # [B, N, Hq, D]
        projected = self.k_proj(hidden_states).view(shape)  # [B, N, Hkv, D]
        # Full-attention layers have no v_proj: the unrotated key projection is the value.
        value = self.v_norm(projected if self.v_proj is None else self.v_proj(hidden_states).view(shape))
        key = rotate(self.k_norm(projected))
        cache.present[self.layer_idx] = (key, value)
        past_key, past_value = cache.past_key_values[self.layer_idx]
        output = block_attention(
            query, key, value, past_key, past_value, cache.past_length, self.scaling, self.window, self.causal
        )
        return self.o_proj(output.flatten(2)), None


class MixtureOfExpertsModule(nn.Module):
    """The experts of a layer through :func:`dgcompile.plugins.moe.torch_op.mixture_of_experts`; owns their weights.

    In a packed format the weights are uninitialised, of the same fake mode or device as those of ``original``, and
    their scales are parameters named like them with ``_scale`` added.
    """

    def __init__(self, original: Any, weight_format: WeightFormat = "float", group_size: int = 0) -> None:
        super().__init__()
        self.weight_format = weight_format
        self.group_size = group_size
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(original, name)
            if weight_format == "float":
                self.register_parameter(name, weight)
                self.register_parameter(f"{name}_scale", None)
            else:
                packed, scale = empty_packed(weight, weight_format, group_size)
                self.register_parameter(name, nn.Parameter(packed, requires_grad=False))
                self.register_parameter(f"{name}_scale", nn.Parameter(scale, requires_grad=False))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [T, H], top_k_index and top_k_weights [T, K] -> [T, H]."""
        output: Tensor = mixture_of_experts(
            hidden_states,
            top_k_index.to(torch.int32),
            top_k_weights,
            self.gate_up_proj,
            self.down_proj,
            self.gate_up_proj_scale,
            self.down_proj_scale,
            self.weight_format,
            self.group_size,
        )
        return output


class SelfConditioningModule(nn.Module):
    """Self-conditioning fed with the graph's own input instead of the signal that transformers derives from logits."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.original = original
        self.signal: Tensor | None = None

    def forward(self, inputs_embeds: Tensor, zeros: Tensor) -> Tensor:
        """inputs_embeds [B, L, H] -> [B, L, H]; the second argument (no logits were passed) is replaced."""
        combined: Tensor = self.original(inputs_embeds, self.signal)
        return combined


class EncoderGraph(nn.Module):
    """Clean tokens -> new rows of the KV cache: the encoder graph of the contract."""

    def __init__(self, model: DiffusionGemmaForBlockDiffusion) -> None:
        super().__init__()
        self.text_model = model.model.encoder.language_model
        self.pad_token_id = int(self.text_model.padding_idx or 0)

    def forward(
        self,
        input_ids: Tensor,
        input_length: Tensor,
        past_length: Tensor,
        past_key_values: list[tuple[Tensor, Tensor]],
    ) -> list[tuple[Tensor, Tensor]]:
        """Shapes and dtypes as in :func:`dgcompile.contract.graph_inputs`; returns the new rows, [B, N, Hkv_i, D_i]."""
        offsets = torch.arange(input_ids.shape[1])
        # Right padding cannot be seen by a causal token before it; whatever ids it holds, it becomes the pad token.
        input_ids = torch.where(offsets[None, :] < input_length[:, None], input_ids, self.pad_token_id)
        cache = PastKeyValues(past_key_values, past_length)
        self.text_model(
            input_ids=input_ids,
            position_ids=past_length[:, None] + offsets[None, :],
            attention_mask={"full_attention": None, "sliding_attention": None},
            cache=cache,
        )
        return [cache.present[index] for index in range(len(past_key_values))]


class DenoiserGraph(nn.Module):
    """Canvas -> next canvas: the denoiser graph of the contract, sampler included."""

    def __init__(self, model: DiffusionGemmaForBlockDiffusion) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        canvas_ids: Tensor,
        self_conditioning: Tensor,
        past_length: Tensor,
        temperature: Tensor,
        entropy_bound: Tensor,
        uniform: Tensor,
        noise_ids: Tensor,
        past_key_values: list[tuple[Tensor, Tensor]],
    ) -> SamplerOutput:
        """Shapes and dtypes as in :func:`dgcompile.contract.graph_inputs`."""
        decoder = self.model.model.decoder
        decoder.self_conditioning.signal = self_conditioning
        try:
            logits = self.model(
                decoder_input_ids=canvas_ids,
                decoder_position_ids=past_length[:, None] + torch.arange(canvas_ids.shape[1])[None, :],
                decoder_attention_mask={"full_attention": None, "sliding_attention": None},
                cache=PastKeyValues(past_key_values, past_length),
            ).logits
        finally:
            decoder.self_conditioning.signal = None
        embedding = decoder.embed_tokens
        return denoising_sample(
            logits, temperature, entropy_bound, uniform, noise_ids, embedding.weight, embedding.embed_scale
        )


def source_fingerprint(thing: Any) -> str:
    """sha256 over the source tokens of a class or function, comments, blank lines and indentation width left out."""
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines = io.StringIO(inspect.getsource(thing)).readline
    words = [token.string for token in tokenize.generate_tokens(lines) if token.type not in skipped]
    return hashlib.sha256("\n".join(words).encode()).hexdigest()


def check_transformers() -> None:
    """Refuses a transformers whose swapped classes are not the known ones.

    Raises:
        TraceError: naming the class that differs or is missing.
    """
    for name, known in _KNOWN_CLASSES.items():
        thing = getattr(modeling, name, None)
        if thing is None or source_fingerprint(thing) != known:
            found = "is missing" if thing is None else "differs from the one this version of dgcompile replaces"
            raise TraceError(
                f"transformers {transformers_version}: {name} {found}",
                expected=f"transformers {SUPPORTED_TRANSFORMERS}",
                fix=f"pip install 'transformers=={SUPPORTED_TRANSFORMERS}.*'",
            )


def swap_modules(
    model: DiffusionGemmaForBlockDiffusion, weight_format: WeightFormat = "float", group_size: int = 0
) -> None:
    """Replaces attention, experts and self-conditioning of ``model`` in place, by exact class.

    Args:
        model: of any dtype, with real or fake parameters.
        weight_format, group_size: how the experts are stored, see :mod:`dgcompile.plugins.moe.formats`.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is modeling.DiffusionGemmaEncoderTextAttention:
                setattr(parent, name, BlockAttentionModule(child, causal=True))
            elif type(child) is modeling.DiffusionGemmaDecoderTextAttention:
                setattr(parent, name, BlockAttentionModule(child, causal=False))
            elif type(child) is modeling.DiffusionGemmaTextExperts:
                setattr(parent, name, MixtureOfExpertsModule(child, weight_format, group_size))
            elif type(child) is modeling.DiffusionGemmaSelfConditioning:
                setattr(parent, name, SelfConditioningModule(child))
