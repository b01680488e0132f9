"""Tiny random DiffusionGemma checkpoints with every structural feature of the published one.

Weights are random but not bland: each class of weight is scaled so that the logits are peaked in some positions and
flat in others, the sampler accepts part of a canvas per step, and some canvases converge before the last step. With
transformers' own initialisation every distribution is uniform and no comparison of two implementations means anything.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

from tests.model_config import BOS, END_OF_TURN, EOS, PAD, published_form
from tests.model_weights import scaled

SPECIAL_TOKENS = ("<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>")
IMAGE_TOKENS = ("<|image|>", "<|image>", "<image|>")
"""The last ids of every vocabulary: the image itself, its begin and its end."""

CHAT_TEMPLATE = """{{- bos_token -}}
{%- for message in messages -%}
    {%- if message['role'] not in ['system', 'user', 'assistant'] -%}
        {{- raise_exception('unknown role ' ~ message['role']) -}}
    {%- endif -%}
    {{- '<|turn>' ~ message['role'] ~ '\\n' ~ message['content'] | trim ~ '<turn|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|turn>assistant\\n' -}}
{%- endif -%}
"""

LayerName = Literal["sliding", "full"]
ConfigForm = Literal["published", "transformers"]


def random_checkpoint(
    folder: Path,
    *,
    layers: Sequence[LayerName] = ("sliding", "full", "full"),
    hidden: int = 32,
    intermediate: int = 24,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    full_kv_heads: int = 1,
    full_head_dim: int = 16,
    experts: int = 6,
    top_k: int = 2,
    moe_intermediate: int = 16,
    vocab: int = 288,
    canvas: int = 16,
    window: int = 24,
    max_position_embeddings: int = 4096,
    sharpness: float = 5.0,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    config_form: ConfigForm = "published",
    shards: int = 1,
    generation: Mapping[str, Any] | None = None,
    with_tokenizer: bool = True,
) -> Path:
    """Writes a random checkpoint in the published layout into ``folder`` (created when missing) and returns it.

    Args:
        folder: where the files go: config.json, generation_config.json, safetensors, tokenizer and chat template.
        layers: kinds of the layers, the last one "full". Two full layers let the encoder's full attention matter.
        hidden, intermediate, heads, kv_heads, head_dim, full_kv_heads, full_head_dim: widths; "full" ones are those of
            the full-attention layers.
        experts, top_k, moe_intermediate: the mixture of experts.
        vocab: at least 16. From 265 on, the tokenizer can spell every byte.
        canvas, window: canvas length and sliding window.
        sharpness: scale of the logits. At 5 entropies run from 0 to about 2 nats; lower is flatter.
        seed: equal arguments and seed give equal files.
        dtype: of the stored tensors.
        config_form: "published" has ``global_head_dim``; "transformers" is what transformers itself saves.
        shards: number of safetensors files; more than one also writes the index.
        generation: changes to generation_config.json; ``entropy_bound`` goes where it belongs.
        with_tokenizer: also write tokenizer.json, tokenizer_config.json and chat_template.jinja.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = published_form(
        layer_types=[f"{kind}_attention" for kind in layers],
        num_hidden_layers=len(layers),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        num_global_key_value_heads=full_kv_heads,
        global_head_dim=full_head_dim,
        num_experts=experts,
        top_k_experts=top_k,
        moe_intermediate_size=moe_intermediate,
        vocab_size=vocab,
        sliding_window=window,
        max_position_embeddings=max_position_embeddings,
        canvas_length=canvas,
        dtype=str(dtype).removeprefix("torch."),
    )
    model = _model(config)
    tensors = random_tensors(model, hidden=hidden, sharpness=sharpness, seed=seed, dtype=dtype)
    _save_tensors(tensors, folder, shards)
    written = config if config_form == "published" else json.loads(model.config.to_json_string(use_diff=False))
    _write_json(folder / "config.json", written)
    _write_json(folder / "generation_config.json", _generation_config(canvas, generation or {}))
    if with_tokenizer:
        write_tokenizer(folder, vocab)
    return folder


def random_tensors(
    model: DiffusionGemmaForBlockDiffusion, *, hidden: int, sharpness: float, seed: int, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Random stored tensors of ``model``, shared ones once and under their decoder names, in ``dtype``."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, parameter in sorted(model.state_dict().items()):
        shared = name.startswith("model.encoder.language_model.") and not name.endswith("layer_scalar")
        if name == "lm_head.weight" or shared:
            continue
        noise = torch.randn(parameter.shape, generator=generator)
        tensors[name] = scaled(name, noise, hidden, (sharpness, 1.0)).to(dtype).contiguous()
    return tensors


def write_tokenizer(folder: Path, vocab: int) -> None:
    """Writes tokenizer.json (bytes as tokens after the special ones, then unused fillers) and the chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # The common characters first, so that a small vocabulary still spells plain text.
    alphabet.sort(key=lambda symbol: (not symbol.isascii() and symbol not in "ĠĊ", symbol))
    spellings = [*SPECIAL_TOKENS, *alphabet][: vocab - len(IMAGE_TOKENS)]
    spellings += [f"<unused{index}>" for index in range(vocab - len(IMAGE_TOKENS) - len(spellings))]
    spellings += IMAGE_TOKENS
    tokenizer = Tokenizer(
        models.BPE(vocab={text: index for index, text in enumerate(spellings)}, merges=[], unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in (*SPECIAL_TOKENS, *IMAGE_TOKENS)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "unk_token": "<unk>",
            "clean_up_tokenization_spaces": False,
        },
    )


def _generation_config(canvas: int, changes: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {
        "bos_token_id": BOS,
        "eos_token_id": [EOS, END_OF_TURN],
        "pad_token_id": PAD,
        "max_new_tokens": 3 * canvas,
        "max_denoising_steps": 12,
        "t_min": 0.4,
        "t_max": 0.8,
        "stability_threshold": 1,
        "confidence_threshold": 0.005,
        "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 0.1},
    }
    for key, value in changes.items():
        if key == "entropy_bound":
            values["sampler_config"]["entropy_bound"] = value
        else:
            values[key] = value
    return values


def _model(config: dict[str, Any]) -> DiffusionGemmaForBlockDiffusion:
    # transformers edits the nested dictionaries that it is given.
    copy = json.loads(json.dumps(config))
    # Its initialisation is overwritten, so only the random state around it must stay as it was.
    state = torch.random.get_rng_state()
    try:
        return DiffusionGemmaForBlockDiffusion(DiffusionGemmaConfig(**copy))
    finally:
        torch.random.set_rng_state(state)


def _save_tensors(tensors: dict[str, torch.Tensor], folder: Path, shards: int) -> None:
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(tensors)
    index: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[shard::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(part, file)
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    _write_json(
        folder / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))},
    )


def _write_json(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")


logging.getLogger("transformers").setLevel(logging.ERROR)
