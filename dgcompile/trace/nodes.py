"""The ONNX nodes of the custom operators: domain ``dgcompile``, version 1.

The schemas say what a node takes; the translations are what ``torch.onnx.export`` calls for each custom torch operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from onnx.defs import OpSchema
from onnxscript.values import Op, Opset

from dgcompile.contract import ONNX_DOMAIN
from dgcompile.plugins.block_attention import torch_op as _block_attention_op  # noqa: F401 - registers the operator
from dgcompile.plugins.moe import torch_op as _mixture_of_experts_op  # noqa: F401 - registers the operator

ONNX_DOMAIN_VERSION = 1
DOMAIN = Opset(ONNX_DOMAIN, ONNX_DOMAIN_VERSION)

_TYPES = [
    ("T", ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"], "hidden states, keys and values"),
    ("W", ["tensor(float)", "tensor(float16)", "tensor(bfloat16)", "tensor(uint8)"], "expert weights"),
    ("R", ["tensor(float)"], "routing weights"),
    ("I", ["tensor(int32)"], "lengths and expert ids"),
]


def _operator(name: str, inputs: dict[str, str], attributes: dict[str, OpSchema.AttrType]) -> Op:
    """An operator of the domain with one output of type T; ``inputs`` maps names to the types above."""
    schema = OpSchema(
        name,
        ONNX_DOMAIN,
        ONNX_DOMAIN_VERSION,
        inputs=[OpSchema.FormalParameter(key, kind) for key, kind in inputs.items()],
        outputs=[OpSchema.FormalParameter("output", "T")],
        type_constraints=_TYPES,
        attributes=[OpSchema.Attribute(key, kind, "", required=True) for key, kind in attributes.items()],
    )
    return Op(DOMAIN, name, schema)


_BLOCK_ATTENTION = _operator(
    "BlockAttention",
    {"query": "T", "key": "T", "value": "T", "past_key": "T", "past_value": "T", "past_length": "I"},
    {"scale": OpSchema.AttrType.FLOAT, "window": OpSchema.AttrType.INT, "causal": OpSchema.AttrType.INT},
)
_MIXTURE_OF_EXPERTS = _operator(
    "MixtureOfExperts",
    {"hidden": "T", "expert_ids": "I", "expert_weights": "R", "gate_up": "W", "down": "W"},
    {
        "activation": OpSchema.AttrType.STRING,
        "weight_format": OpSchema.AttrType.STRING,
        "group_size": OpSchema.AttrType.INT,
    },
)


def _block_attention(  # type: ignore[no-untyped-def]  # symbolic tensors of the ONNX graph being recorded
    query, key, value, past_key, past_value, past_length, scale: float, window: int, causal: bool
):
    return _BLOCK_ATTENTION(
        query, key, value, past_key, past_value, past_length, scale=scale, window=window, causal=int(causal)
    )


def _mixture_of_experts(hidden, expert_ids, expert_weights, gate_up, down):  # type: ignore[no-untyped-def]
    return _MIXTURE_OF_EXPERTS(
        hidden, expert_ids, expert_weights, gate_up, down, activation="gelu_tanh", weight_format="float", group_size=0
    )


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.dgcompile.block_attention.default: _block_attention,
    torch.ops.dgcompile.mixture_of_experts.default: _mixture_of_experts,
}
"""``custom_translation_table`` of ``torch.onnx.export``."""
