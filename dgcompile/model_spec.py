"""ModelSpec: the frozen shape of a DiffusionGemma model, read from ``config.json`` and validated.

Everything downstream (tensor names, cache sizes, graph inputs, plans) is derived from this one object. Two forms of
``config.json`` are read: the published one, which carries ``global_head_dim`` and ``num_global_key_value_heads``, and the
one that transformers 5.24 saves, which carries ``per_layer_config`` and leaves out ``final_logit_softcapping``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError

from dgcompile.errors import CheckpointError

MODEL_TYPE = "diffusion_gemma"
"""``model_type`` of the checkpoints that dgcompile compiles."""

DEFAULT_SOFTCAP = 30.0
"""``final_logit_softcapping`` where a config omits it: the default of transformers' DiffusionGemmaTextConfig."""

LayerKind = Literal["sliding_attention", "full_attention"]


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
    num_key_value_heads: PositiveInt
    head_dim: PositiveInt
    window: int
    has_v_proj: bool


class ModelSpec(_Frozen):
    """Shape of the text model. Field names are those of the Hugging Face config; token ids are in ``GenerationDefaults``."""

    vocab_size: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_attention_heads: PositiveInt
    num_experts: PositiveInt
    top_k_experts: PositiveInt
    moe_intermediate_size: PositiveInt
    sliding_window: PositiveInt
    canvas_length: PositiveInt
    max_position_embeddings: PositiveInt
    final_logit_softcapping: float
    rms_norm_eps: float
    hidden_activation: str
    layers: tuple[LayerSpec, ...]

    @property
    def num_hidden_layers(self) -> int:
        """Number of transformer layers."""
        return len(self.layers)

    def cache_capacity(self, layer: int, max_context: int) -> int:
        """Rows that the KV cache of ``layer`` holds: the window of a sliding layer (a ring), ``max_context`` otherwise."""
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
        try:
            fields = _text_fields(text, source)
            spec = cls.model_validate({**fields, "canvas_length": config.get("canvas_length", 256)})
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise CheckpointError(
                f"{source}: text_config.{where} is {first.get('input')!r}: {first['msg'].lower()}",
                fix="fix the value or fetch the checkpoint again",
            ) from error
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
        raise CheckpointError(f"{source}: text_config.layer_types is {kinds!r}", expected="a list with one kind per layer")
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
            "num_key_value_heads": _per_layer(text, index, kind, "num_key_value_heads", source),
            "head_dim": _per_layer(text, index, kind, "head_dim", source),
            "window": window if kind == "sliding_attention" else 0,
            "has_v_proj": kind == "sliding_attention",
        }
        for index, kind in enumerate(kinds)
    ]
    return {
        "layers": layers,
        "sliding_window": window,
        "final_logit_softcapping": text.get("final_logit_softcapping") or DEFAULT_SOFTCAP,
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


def _per_layer(text: Mapping[str, Any], index: int, kind: str, key: str, source: str) -> Any:
    """``head_dim`` or ``num_key_value_heads`` of one layer, from whichever of the two config forms is present."""
    overrides = text.get("per_layer_config")
    if isinstance(overrides, Mapping):
        # JSON object keys are strings; transformers itself uses integers in memory.
        entry = overrides.get(str(index), overrides.get(index, {}))
        if isinstance(entry, Mapping) and entry.get(key) is not None:
            return entry[key]
    elif kind == "full_attention":
        published = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}[key]
        if text.get(published) is not None:
            return text[published]
        if key == "head_dim":
            raise CheckpointError(
                f"{source}: neither text_config.{published} nor per_layer_config is present",
                expected=f"the {key} of the full-attention layers",
            )
    if text.get(key) is None:
        raise CheckpointError(f"{source}: text_config.{key} is missing", fix="fetch the checkpoint again")
    return text[key]


def _check_consistency(spec: ModelSpec, source: str) -> None:
    """Refuses shapes that would fail only deep inside tracing."""
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
                f"{source}: layer {index} has {spec.num_attention_heads} heads and {layer.num_key_value_heads} KV heads",
                expected="KV heads that divide the heads",
            )
