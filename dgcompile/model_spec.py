"""ModelSpec: the frozen shape of a DiffusionGemma model, read from ``config.json`` and validated.

Everything downstream (tensor names, cache sizes, graph inputs, plans) is derived from this one object. Two forms of
``config.json`` are read: the published one, which carries ``global_head_dim`` and ``num_global_key_value_heads``, and
the one that transformers 5.24 saves, which carries ``per_layer_config`` and leaves out ``final_logit_softcapping``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dgcompile.config_file import validation_error
from dgcompile.errors import CheckpointError

MODEL_TYPE = "diffusion_gemma"
"""``model_type`` of the checkpoints that dgcompile compiles."""

DEFAULT_SOFTCAP = 30.0
"""``final_logit_softcapping`` where a config omits it: the default of transformers' DiffusionGemmaTextConfig."""

DEFAULT_CANVAS_LENGTH = 256
"""``canvas_length`` where a config omits it: the default of transformers' DiffusionGemmaConfig."""

LayerKind = Literal["sliding_attention", "full_attention"]
# Strict: "64", 64.0 and true are no sizes. The bound keeps products of two of them within 64 bits.
Size = Annotated[int, Field(strict=True, gt=0, lt=2**31)]
PositiveNumber = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class LayerSpec(_Frozen):
    """One transformer layer.

    Attributes:
        kind: the attention pattern.
        num_key_value_heads: KV heads of this layer.
        head_dim: width of one head.
        window: tokens that a query may look back on including itself; 0 means no limit.
        has_v_proj: False on full-attention layers, whose values are the (normed, unrotated) keys.
    """

    kind: LayerKind
    num_key_value_heads: Size
    head_dim: Size
    window: Annotated[int, Field(strict=True, ge=0, lt=2**31)]
    has_v_proj: bool


class ModelSpec(_Frozen):
    """Shape of the text model. Fields have the names of the Hugging Face config; token ids are in GenerationConfig."""

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_attention_heads: Size
    num_experts: Size
    top_k_experts: Size
    moe_intermediate_size: Size
    sliding_window: Size
    canvas_length: Size
    max_position_embeddings: Size
    final_logit_softcapping: PositiveNumber
    rms_norm_eps: PositiveNumber
    hidden_activation: str
    layers: tuple[LayerSpec, ...]

    @property
    def num_hidden_layers(self) -> int:
        """Number of transformer layers."""
        return len(self.layers)

    def cache_capacity(self, layer: int, max_context: int) -> int:
        """Rows of the KV cache of ``layer``: the window of a sliding layer (a ring), ``max_context`` otherwise."""
        window = self.layers[layer].window
        return min(window, max_context) if window else max_context

    def expected_tensors(self) -> dict[str, tuple[int, ...]]:
        """Canonical names and shapes of the text model's stored tensors, in layer order.

        Canonical means as published: everything under ``model.decoder`` once, and the encoder's own ``layer_scalar``.
        """
        hidden, dense, moe = self.hidden_size, self.intermediate_size, self.moe_intermediate_size
        tensors: dict[str, tuple[int, ...]] = {"model.decoder.embed_tokens.weight": (self.vocab_size, hidden)}
        for index, layer in enumerate(self.layers):
            prefix = f"model.decoder.layers.{index}."
            query, kv = self.num_attention_heads * layer.head_dim, layer.num_key_value_heads * layer.head_dim
            tensors |= {
                prefix + "self_attn.q_proj.weight": (query, hidden),
                prefix + "self_attn.k_proj.weight": (kv, hidden),
                **({prefix + "self_attn.v_proj.weight": (kv, hidden)} if layer.has_v_proj else {}),
                prefix + "self_attn.o_proj.weight": (hidden, query),
                prefix + "self_attn.q_norm.weight": (layer.head_dim,),
                prefix + "self_attn.k_norm.weight": (layer.head_dim,),
                prefix + "mlp.gate_proj.weight": (dense, hidden),
                prefix + "mlp.up_proj.weight": (dense, hidden),
                prefix + "mlp.down_proj.weight": (hidden, dense),
                **{
                    prefix + f"{norm}.weight": (hidden,)
                    for norm in (
                        "input_layernorm",
                        "post_attention_layernorm",
                        "pre_feedforward_layernorm",
                        "pre_feedforward_layernorm_2",
                        "post_feedforward_layernorm",
                        "post_feedforward_layernorm_1",
                        "post_feedforward_layernorm_2",
                    )
                },
                prefix + "router.proj.weight": (self.num_experts, hidden),
                prefix + "router.scale": (hidden,),
                prefix + "router.per_expert_scale": (self.num_experts,),
                prefix + "experts.gate_up_proj": (self.num_experts, 2 * moe, hidden),
                prefix + "experts.down_proj": (self.num_experts, hidden, moe),
                prefix + "layer_scalar": (1,),
                f"model.encoder.language_model.layers.{index}.layer_scalar": (1,),
            }
        tensors["model.decoder.norm.weight"] = (hidden,)
        tensors |= {
            "model.decoder.self_conditioning.pre_norm.weight": (hidden,),
            "model.decoder.self_conditioning.gate_proj.weight": (dense, hidden),
            "model.decoder.self_conditioning.up_proj.weight": (dense, hidden),
            "model.decoder.self_conditioning.down_proj.weight": (hidden, dense),
        }
        return tensors

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, source: str = "config.json") -> ModelSpec:
        """Reads the parsed ``config.json``.

        Args:
            config: the parsed file.
            source: how error messages name the file.

        Raises:
            CheckpointError: another model type, or a key that is missing, malformed or inconsistent.
        """
        model_type = config.get("model_type")
        if model_type != MODEL_TYPE:
            raise CheckpointError(
                f"{source}: model_type is {model_type!r}",
                expected=repr(MODEL_TYPE),
                fix="give a DiffusionGemma checkpoint such as google/diffusiongemma-26B-A4B-it",
            )
        text = config.get("text_config")
        if not isinstance(text, Mapping):
            raise CheckpointError(f"{source}: text_config is missing", expected="an object with the text model's shape")
        if config.get("tie_word_embeddings") is False:
            # In this model the flag unties everything that encoder and decoder share, not only the LM head.
            raise CheckpointError(
                f"{source}: tie_word_embeddings is false", expected="true: encoder and decoder share their weights"
            )
        fields = {**_text_fields(text, source), "canvas_length": config.get("canvas_length", DEFAULT_CANVAS_LENGTH)}
        try:
            spec = cls.model_validate(fields)
        except ValidationError as error:
            inside = error.errors()[0]["loc"][:1] != ("canvas_length",)
            prefix = "text_config." if inside else ""
            raise validation_error(source, error, cls, error=CheckpointError, prefix=prefix) from error
        _check_consistency(spec, source)
        return spec


def _text_fields(text: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Maps either form of ``text_config`` to ModelSpec's fields (all but ``canvas_length``)."""

    def need(key: str) -> Any:
        # transformers' class defaults describe no published model, so nothing may be filled in silently.
        if text.get(key) is None:
            raise CheckpointError(f"{source}: text_config.{key} is missing", fix="fetch the checkpoint again")
        return text[key]

    kinds = need("layer_types")
    if not isinstance(kinds, list) or not kinds:
        raise CheckpointError(
            f"{source}: text_config.layer_types is {kinds!r}", expected="a list with one kind per layer"
        )
    declared = text.get("num_hidden_layers", len(kinds))
    if declared != len(kinds):
        raise CheckpointError(
            f"{source}: text_config.num_hidden_layers is {declared!r} but layer_types has {len(kinds)} entries",
            expected="equal counts",
        )
    if kinds[-1] != "full_attention":
        # transformers would turn the last layer into a full one, silently changing its shape.
        raise CheckpointError(f"{source}: the last layer is {kinds[-1]!r}", expected="'full_attention'")
    if text.get("attention_bias") or text.get("use_bidirectional_attention") == "all":
        raise CheckpointError(
            f"{source}: attention_bias or use_bidirectional_attention='all' is set",
            expected="a DiffusionGemma text model, which has neither",
        )
    window = need("sliding_window")
    layers = [
        {
            "kind": kind,
            **{key: need(key) if override.get(key) is None else override[key] for key in _PER_LAYER_KEYS},
            "window": window if kind == "sliding_attention" else 0,
            "has_v_proj": kind == "sliding_attention",
        }
        for kind, override in zip(kinds, _layer_overrides(text, kinds, source), strict=True)
    ]
    return {
        "layers": layers,
        "sliding_window": window,
        "final_logit_softcapping": text.get("final_logit_softcapping", DEFAULT_SOFTCAP),
        "rms_norm_eps": text.get("rms_norm_eps", 1e-6),
        "hidden_activation": text.get("hidden_activation", "gelu_pytorch_tanh"),
        **{
            key: need(key)
            for key in (
                "vocab_size",
                "hidden_size",
                "intermediate_size",
                "num_attention_heads",
                "num_experts",
                "top_k_experts",
                "moe_intermediate_size",
                "max_position_embeddings",
            )
        },
    }


_PER_LAYER_KEYS = ("num_key_value_heads", "head_dim")


def _layer_overrides(text: Mapping[str, Any], kinds: list[Any], source: str) -> list[dict[str, Any]]:
    """What each layer has instead of ``text``'s own ``head_dim`` and ``num_key_value_heads``, from either config form.

    As in transformers, ``per_layer_config`` hides the published form's keys when both are there.
    """
    if "per_layer_config" not in text:
        full = {"head_dim": text.get("global_head_dim")}
        if full["head_dim"] is None:
            # transformers would fill in 512.
            raise CheckpointError(
                f"{source}: neither text_config.global_head_dim nor text_config.per_layer_config is present",
                expected="the head_dim of the full-attention layers",
            )
        if text.get("num_global_key_value_heads") is not None:
            full["num_key_value_heads"] = text["num_global_key_value_heads"]
        return [full if kind == "full_attention" else {} for kind in kinds]

    given = text["per_layer_config"] or {}
    if not isinstance(given, Mapping):
        raise CheckpointError(
            f"{source}: text_config.per_layer_config is {given!r}", expected="an object with an entry per layer index"
        )
    overrides: list[dict[str, Any]] = [{} for _ in kinds]
    for key, entry in given.items():
        # transformers pads the keys with zeros ("05"), so that they sort.
        if not re.fullmatch(r"[0-9]{1,9}", str(key)) or int(key) >= len(kinds) or not isinstance(entry, Mapping):
            raise CheckpointError(
                f"{source}: text_config.per_layer_config has the entry {key!r}: {entry!r}",
                expected=f"keys from 0 to {len(kinds) - 1} with an object each",
            )
        for name, value in entry.items():
            if name in _PER_LAYER_KEYS:
                overrides[int(key)][name] = value
            elif value != text.get(name):
                raise CheckpointError(
                    f"{source}: text_config.per_layer_config.{key} has {name!r}: {value!r}",
                    expected=f"only {' and '.join(_PER_LAYER_KEYS)} to differ between layers",
                )
    return overrides


def _check_consistency(spec: ModelSpec, source: str) -> None:
    """Refuses what would fail only deep inside tracing, or not at all and compute something else."""
    if spec.top_k_experts > spec.num_experts:
        raise CheckpointError(
            f"{source}: top_k_experts is {spec.top_k_experts} but num_experts is {spec.num_experts}",
            expected="top_k_experts <= num_experts",
        )
    if spec.hidden_activation != "gelu_pytorch_tanh":
        raise CheckpointError(
            f"{source}: hidden_activation is {spec.hidden_activation!r}", expected="'gelu_pytorch_tanh'"
        )
    for index, layer in enumerate(spec.layers):
        if spec.num_attention_heads % layer.num_key_value_heads:
            raise CheckpointError(
                f"{source}: layer {index} has {layer.num_key_value_heads} KV heads",
                expected=f"a divisor of the {spec.num_attention_heads} heads",
            )
        if layer.head_dim % 2:
            raise CheckpointError(
                f"{source}: layer {index} has head_dim {layer.head_dim}",
                expected="an even number, which rotary embeddings need",
            )
