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
    (
        "W",
        [
            "tensor(float)",
            "tensor(float16)",
            "tensor(bfloat16)",
            "tensor(float8e4m3fn)",
            "tensor(uint8)",
            "tensor(int8)",
        ],
        "expert weights: as they are, in E4M3, or INT4 in bytes",
    ),
    ("S", ["tensor(float)", "tensor(float16)"], "scales of expert weights"),
    ("R", ["tensor(float)"], "routing weights"),
    ("I", ["tensor(int32)"], "lengths and expert ids"),
]


def _operator(
    name: str, inputs: dict[str, str], attributes: dict[str, OpSchema.AttrType], optional: dict[str, str] | None = None
) -> Op:
    """An operator of the domain with one output of type T; ``inputs`` and ``optional`` map names to the types above."""
    required = [OpSchema.FormalParameter(key, kind) for key, kind in inputs.items()]
    absent = OpSchema.FormalParameterOption.Optional
    others = [OpSchema.FormalParameter(key, kind, param_option=absent) for key, kind in (optional or {}).items()]
    schema = OpSchema(
        name,
        ONNX_DOMAIN,
        ONNX_DOMAIN_VERSION,
        inputs=[*required, *others],
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
    {"gate_up_scale": "S", "down_scale": "S"},
)


def _block_attention(  # type: ignore[no-untyped-def]  # symbolic tensors of the ONNX graph being recorded
    query, key, value, past_key, past_value, past_length, scale: float, window: int, causal: bool
):
    return _BLOCK_ATTENTION(
        query, key, value, past_key, past_value, past_length, scale=scale, window=window, causal=int(causal)
    )


def _mixture_of_experts(  # type: ignore[no-untyped-def]  # as above
    hidden,
    expert_ids,
    expert_weights,
    gate_up,
    down,
    gate_up_scale=None,
    down_scale=None,
    weight_format: str = "float",
    group_size: int = 0,
):
    scales = [scale for scale in (gate_up_scale, down_scale) if scale is not None]
    return _MIXTURE_OF_EXPERTS(
        hidden,
        expert_ids,
        expert_weights,
        gate_up,
        down,
        *scales,
        activation="gelu_tanh",
        weight_format=weight_format,
        group_size=group_size,
    )


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.dgcompile.block_attention.default: _block_attention,
    torch.ops.dgcompile.mixture_of_experts.default: _mixture_of_experts,
}
"""``custom_translation_table`` of ``torch.onnx.export``."""
