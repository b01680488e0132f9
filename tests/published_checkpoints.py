"""Small quantized checkpoints as nvidia-modelopt and llm-compressor publish them, by the names of their tensors.

Written here without either, from plain tensors; ``tests/test_published.py`` also reads one that modelopt itself wrote.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dgcompile.plugins.moe.formats import fp8_decode
from tests.tiny_checkpoint import tiny_config, tiny_tensors, write_checkpoint

Tensors = dict[str, torch.Tensor]

MODELOPT: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": None, "ignore": []}
COMPRESSED_TENSORS: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "ignore": ["lm_head", "re:.*self_conditioning.*"],
    "sparsity_config": {},
    "transform_config": {},
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "format": "float-quantized",
            "weights": {
                "num_bits": 8,
                "type": "float",
                "strategy": "channel",
                "symmetric": True,
                "dynamic": False,
                "group_size": None,
                "block_structure": None,
            },
            "input_activations": {
                "num_bits": 8,
                "type": "float",
                "strategy": "token",
                "symmetric": True,
                "dynamic": True,
                "group_size": None,
                "block_structure": None,
            },
            "output_activations": None,
        }
    },
}


def linear_layers(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every linear layer that such checkpoints quantize, with its weight [N, K]; experts one by one."""
    for name, values in tensors.items():
        if ".experts." in name:
            experts, _, projection = name.rpartition(".")
            for expert, matrix in enumerate(values):
                if projection == "gate_up_proj":
                    gate, up = matrix.chunk(2)
                    yield f"{experts}.{expert}.gate_proj", gate
                    yield f"{experts}.{expert}.up_proj", up
                else:
                    yield f"{experts}.{expert}.{projection}", matrix
        elif name.endswith("_proj.weight"):
            yield name.removesuffix(".weight"), values


def modelopt_tensors(tensors: Mapping[str, torch.Tensor], *, per_channel: bool = False) -> Tensors:
    """What modelopt's export stores: a scale per tensor and one of the activations, or a scale per channel."""
    stored: Tensors = {}
    for number, (layer, weight) in enumerate(linear_layers(tensors), 1):
        largest = weight.float().abs()
        scale = (largest.amax(dim=1) if per_channel else largest.max()) / 448
        stored |= _quantized(layer, weight, scale)
        if not per_channel:
            stored[f"{layer}.input_scale"] = torch.tensor(number / 1000)
    return {**_rest(tensors), **stored}


def compressed_tensors(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """What llm-compressor's FP8_DYNAMIC stores: bfloat16 scales [N, 1], self-conditioning left as it is."""
    stored: Tensors = {}
    for layer, weight in linear_layers(tensors):
        if "self_conditioning" not in layer:
            scale = (weight.float().abs().amax(dim=1, keepdim=True) / 448).bfloat16()
            stored |= _quantized(layer, weight, scale)
    return {**_rest(tensors), **stored, **{name: tensors[name] for name in tensors if "self_conditioning" in name}}


def _quantized(layer: str, weight: torch.Tensor, scale: torch.Tensor) -> Tensors:
    divisor = scale.float() if scale.ndim != 1 else scale.float()[:, None]
    codes = (weight.float() / divisor).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {f"{layer}.weight": codes, f"{layer}.weight_scale": scale.clone()}


def _rest(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    return {
        name: values
        for name, values in tensors.items()
        if ".experts." not in name and not name.endswith("_proj.weight")
    } | {name: values for name, values in tensors.items() if name.endswith("router.proj.weight")}


def write_published(
    folder: Path,
    stored: Mapping[str, torch.Tensor],
    quantization: Mapping[str, Any],
    *,
    where: str = "config.json",
    shards: Sequence[Sequence[str]] | None = None,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a checkpoint with ``stored`` tensors; ``where`` says which file tells of the ``quantization``."""
    config = dict(config or tiny_config())
    if where == "config.json":
        config["quantization_config"] = dict(quantization)
    write_checkpoint(folder, stored, shards=shards, config=config)
    if where != "config.json":
        told = {key: value for key, value in quantization.items() if key != "quant_method"}
        (folder / where).write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": told}))
    return folder


LAYOUTS: dict[str, tuple[Callable[[Mapping[str, torch.Tensor]], Tensors], dict[str, Any]]] = {
    "modelopt": (modelopt_tensors, MODELOPT),
    "modelopt per channel": (
        lambda tensors: modelopt_tensors(tensors, per_channel=True),
        {**MODELOPT, "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
    ),
    "compressed-tensors": (compressed_tensors, COMPRESSED_TENSORS),
}
"""How each layout stores plain tensors, and what its config says."""


def write_layout(folder: Path, layout: str, tensors: Mapping[str, torch.Tensor] | None = None, **more: Any) -> Tensors:
    """Writes a checkpoint in one of :data:`LAYOUTS` and returns what it stores."""
    make, quantization = LAYOUTS[layout]
    stored = make(tiny_tensors() if tensors is None else tensors)
    write_published(folder, stored, quantization, **more)
    return stored


def dequantized(stored: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Every weight of the model in float64, computed from the stored tensors without torch's own E4M3."""

    def layer(name: str) -> np.ndarray:
        codes = fp8_decode(stored[f"{name}.weight"].view(torch.uint8).numpy()).astype(np.float64)
        scale = stored[f"{name}.weight_scale"].double().numpy()
        return codes * (scale if scale.ndim != 1 else scale[:, None])

    values = {}
    for name, shape in shapes.items():
        if name in stored and stored[name].dtype != torch.float8_e4m3fn:
            values[name] = stored[name].double().numpy()
        elif name.endswith(".weight"):
            values[name] = layer(name.removesuffix(".weight"))
        else:
            experts, _, projection = name.rpartition(".")
            parts = ("gate_proj", "up_proj") if projection == "gate_up_proj" else ("down_proj",)
            rows = [[layer(f"{experts}.{expert}.{part}") for part in parts] for expert in range(shape[0])]
            values[name] = np.stack([np.concatenate(each) for each in rows])
    return values
