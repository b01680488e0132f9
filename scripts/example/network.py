"""The model's forward pass written for training speed on a CPU, over the parameters of the transformers model.

Same arithmetic as transformers' forward (the training script checks that at the end), less of its overhead: no mask
construction, no cache objects, fused norms, tokens sorted by expert so that each expert is one matrix product.

Shapes: B prompts of P = 74 tokens; R canvases of C = 40 tokens, R = B * copies; H = hidden size.
"""

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from transformers import DiffusionGemmaForBlockDiffusion

from example.checkpoint import CANVAS_LENGTH, PROMPT_LENGTH, SLIDING_WINDOW

KeysValues = tuple[torch.Tensor, torch.Tensor]  # both [B, kv heads, tokens, head_dim]


class Gather(torch.autograd.Function):
    """Repeat each token once per chosen expert and sort by expert: [N, H] -> [N * k, H].

    The gradient of plain indexing is a scatter-add; knowing that `order` is a permutation, it is a gather and a sum.
    """

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, k: int) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        ctx.k = k
        return tokens.index_select(0, order // k)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        return gradient.index_select(0, inverse).unflatten(0, (-1, ctx.k)).sum(1), None, None, None


class Permute(torch.autograd.Function):
    """Rows in another order, [M, H] -> [M, H]; `inverse` is the inverse permutation of `order`."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradient.index_select(0, ctx.saved_tensors[0]), None, None


class Routing(NamedTuple):
    """What the balance loss and the expert shares need from one layer's router."""

    probabilities: torch.Tensor  # [N, experts], mean over them is differentiable
    counts: torch.Tensor  # [experts], tokens sent to each expert (k per token)


def apply_rope(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate [..., heads, tokens, d] by tables [tokens, d]."""
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat([-second, first], dim=-1) * sin


def gated_mlp(block: Any, states: torch.Tensor) -> torch.Tensor:
    """The gated block of the dense MLP and of self-conditioning, [..., H] -> [..., H]."""
    gate: torch.Tensor = F.gelu(block.gate_proj(states), approximate="tanh")
    output: torch.Tensor = block.down_proj(gate * block.up_proj(states))
    return output


class TrainingNetwork(nn.Module):
    """Encoder and decoder passes over the parameters of `model`.

    transformers keeps the layer scalars as buffers. They are trained here as parameters, [2 modes, layers], and
    written back by `export_scalars`.
    """

    def __init__(self, model: DiffusionGemmaForBlockDiffusion) -> None:
        super().__init__()
        self.decoder = model.model.decoder
        self.encoder_layers = [model.model.encoder.language_model]  # in a list: its tensors are the decoder's
        config = model.config.text_config
        self.eps = config.rms_norm_eps
        self.softcap = config.final_logit_softcapping
        self.k = config.top_k_experts
        self.experts = config.num_experts
        self.embed_scale = config.hidden_size**0.5
        self.sliding = [kind == "sliding_attention" for kind in config.layer_types]
        self.scalars = nn.Parameter(torch.ones(2, config.num_hidden_layers))
        positions = torch.arange(PROMPT_LENGTH + CANVAS_LENGTH)[None]
        self.rope = {
            sliding: [t[0] for t in self.decoder.rotary_emb(torch.zeros(1), positions, kind)]
            for sliding, kind in ((True, "sliding_attention"), (False, "full_attention"))
        }
        distance = torch.arange(PROMPT_LENGTH)[:, None] - torch.arange(PROMPT_LENGTH)[None]
        self.prompt_masks = {True: (distance >= 0) & (distance < SLIDING_WINDOW), False: distance >= 0}
        self.routing: list[Routing] = []  # filled by each pass with gradients

    @torch.no_grad()
    def export_scalars(self) -> None:
        """Copy the trained layer scalars into the transformers model's buffers."""
        for mode, layers in enumerate((self.encoder_layers[0].layers, self.decoder.layers)):
            for index, layer in enumerate(layers):
                layer.layer_scalar.copy_(self.scalars[mode, index])

    def norm(self, states: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        """RMS norm over the last dimension."""
        return F.rms_norm(states, states.shape[-1:], weight, self.eps)

    def attention(self, index: int, states: torch.Tensor, past: KeysValues | None) -> tuple[torch.Tensor, KeysValues]:
        """Attention of layer `index` for prompts (past is None) [B, P, H] or canvases [R, C, H]."""
        module, sliding = self.decoder.layers[index].self_attn, self.sliding[index]
        rows, tokens, _ = states.shape
        first = 0 if past is None else PROMPT_LENGTH
        cos, sin = (table[first : first + tokens] for table in self.rope[sliding])

        def heads(projection: nn.Linear) -> torch.Tensor:
            return projection(states).view(rows, tokens, -1, module.head_dim)

        query = apply_rope(self.norm(heads(module.q_proj), module.q_norm.weight).transpose(1, 2), cos, sin)
        raw_keys = heads(module.k_proj)
        raw_values = heads(module.v_proj) if sliding else raw_keys  # full layers: K is V
        keys = apply_rope(self.norm(raw_keys, module.k_norm.weight).transpose(1, 2), cos, sin)
        values = self.norm(raw_values).transpose(1, 2)
        fresh = keys, values
        mask = None
        if past is None:
            mask = self.prompt_masks[sliding]
        else:
            seen = slice(1 - SLIDING_WINDOW, None) if sliding else slice(None)
            keys = torch.cat([past[0][:, :, seen], keys], dim=2)
            values = torch.cat([past[1][:, :, seen], values], dim=2)
        output = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=1.0, enable_gqa=True)
        return module.o_proj(output.transpose(1, 2).reshape(rows, tokens, -1)), fresh

    def mixture(self, index: int, flat: torch.Tensor) -> torch.Tensor:
        """Router and experts of layer `index` for tokens [N, H]."""
        layer = self.decoder.layers[index]
        router, experts, k = layer.router, layer.experts, self.k
        scores = router.proj(self.norm(flat) * (router.scale * router.scalar_root_size))
        probabilities = scores.softmax(dim=-1)
        weights, chosen = probabilities.topk(k, dim=-1)  # [N, k]
        weights = weights / weights.sum(dim=-1, keepdim=True) * router.per_expert_scale[chosen]
        order = chosen.view(-1).argsort(stable=True)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
        counts = torch.bincount(chosen.view(-1), minlength=self.experts)
        if torch.is_grad_enabled():
            self.routing.append(Routing(probabilities, counts))
        normed = self.norm(flat, layer.pre_feedforward_layernorm_2.weight)
        parts = Gather.apply(normed, order, inverse, k).split(counts.tolist())
        outputs = []
        for part, gate_up, down in zip(parts, experts.gate_up_proj.unbind(), experts.down_proj.unbind(), strict=True):
            gate, up = F.linear(part, gate_up).chunk(2, dim=-1)
            outputs.append(F.linear(F.gelu(gate, approximate="tanh") * up, down))
        by_token = Permute.apply(torch.cat(outputs), inverse, order).unflatten(0, (-1, k))  # [N, k, H]
        return torch.bmm(weights[:, None], by_token)[:, 0]

    def layer(self, index: int, states: torch.Tensor, past: KeysValues | None) -> tuple[torch.Tensor, KeysValues]:
        """One transformer layer for prompts or canvases."""
        layer = self.decoder.layers[index]
        attended, fresh = self.attention(index, self.norm(states, layer.input_layernorm.weight), past)
        states = states + self.norm(attended, layer.post_attention_layernorm.weight)
        normed = self.norm(states, layer.pre_feedforward_layernorm.weight)
        dense = gated_mlp(layer.mlp, normed)
        sparse = self.mixture(index, states.flatten(0, 1)).view_as(states)
        dense = self.norm(dense, layer.post_feedforward_layernorm_1.weight)
        sparse = self.norm(sparse, layer.post_feedforward_layernorm_2.weight)
        states = states + self.norm(dense + sparse, layer.post_feedforward_layernorm.weight)
        return states * self.scalars[0 if past is None else 1, index], fresh

    def encode(self, prompts: torch.Tensor) -> list[KeysValues]:
        """Keys and values of each layer for prompts [B, P]."""
        states = F.embedding(prompts, self.decoder.embed_tokens.weight) * self.embed_scale
        cache = []
        for index in range(len(self.sliding)):
            states, fresh = self.layer(index, states, None)
            cache.append(fresh)
        return cache

    def decode(self, canvases: torch.Tensor, cache: list[KeysValues], previous: torch.Tensor | None) -> torch.Tensor:
        """Logits [R, C, vocab] for canvases [R, C].

        `previous` is the soft canvas fed back, probabilities [R, C, vocab], all zeros for a row without feedback.
        """
        embedding = self.decoder.embed_tokens.weight
        states = F.embedding(canvases, embedding) * self.embed_scale
        if previous is not None:  # a zero signal passes the block as exactly zero (it has no biases)
            block = self.decoder.self_conditioning
            signal = self.norm((previous @ embedding) * self.embed_scale, block.pre_norm.weight)
            states = states + gated_mlp(block, signal)
        states = self.norm(states)
        for index in range(len(self.sliding)):
            states, _ = self.layer(index, states, cache[index])
        logits = F.linear(self.norm(states, self.decoder.norm.weight), embedding)
        return torch.tanh(logits / self.softcap) * self.softcap

    def balance_loss(self) -> torch.Tensor:
        """How unevenly the passes since the last call used the experts: 1 when perfectly even, 8 at worst."""
        losses = [self.experts * (r.counts / r.counts.sum() * r.probabilities.mean(0)).sum() for r in self.routing]
        return torch.stack(losses).mean()
