"""Quantized checkpoints as others publish them: which are read, and which stored tensors make up which weight.

Two layouts of FP8 (E4M3) are read, without executing anything:

- nvidia-modelopt's unified checkpoint, ``quant_algo`` FP8 (one scale per tensor, static scales of the activations) or
  FP8_PER_CHANNEL_PER_TOKEN (one scale per output channel);
- compressed-tensors, as llm-compressor writes it, ``float-quantized`` with a scale per output channel or tensor.

Both store a linear layer as ``X.weight`` beside ``X.weight_scale`` and, where activations have a static scale,
``X.input_scale``; and the experts of a layer one by one (``experts.3.gate_proj``), not stacked. What a scheme leaves
out is stored as usual. What a weight is, its dtype says: lists of exceptions ("ignore") only repeat that.

Scales of a quantized KV cache (``k_scale``, ``v_scale``) are passed over: they describe how some runtime may store its
cache, and dgcompile's is not quantized.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from dgcompile.config_file import read_json
from dgcompile.errors import CheckpointError
from dgcompile.safetensors_file import StoredTensor

CONFIG_FILE = "config.json"
MODELOPT_FILE = "hf_quant_config.json"

CODES_DTYPE = "F8_E4M3"
"""Dtype of quantized weights, in safetensors' spelling."""

FP8_MAX = 448.0
"""Largest E4M3 number."""

_READ = "FP8 of nvidia-modelopt (FP8, FP8_PER_CHANNEL_PER_TOKEN) or of compressed-tensors (float-quantized)"
_MODELOPT_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")
_SCALE_DTYPES = ("F32", "BF16", "F16")

_KV_CACHE_SCALE = re.compile(r".+\.self_attn\.([kv]_proj\.)?[kv]_scale")
_EXPERT = re.compile(r"(model\.decoder\.layers\.\d+\.experts)\.(0|[1-9]\d{0,8})\.(gate|up|down)_proj")
_LINEAR = re.compile(
    r"model\.decoder\.(self_conditioning\.\w+_proj|layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.\w+_proj|router\.proj))"
)
_SUFFIXES = ("weight", "weight_scale", "input_scale")

_Layer = dict[str, tuple[str, StoredTensor]]
"""Tensors of a linear layer by the last part of their name, each with the name that it is stored under."""


@dataclass(frozen=True)
class QuantizedPart:
    """One stored linear layer: a whole weight, or one of an expert's.

    Attributes:
        name: canonical name of the layer, such as ``model.decoder.layers.0.experts.3.up_proj``.
        codes: E4M3 [N, K].
        scale: what the codes are multiplied with: one number, or N, as [N] or [N, 1]; finite and positive.
        input_scale: static scale of the layer's input, one number; None where the activations have none.
    """

    name: str
    codes: StoredTensor
    scale: StoredTensor
    input_scale: StoredTensor | None

    @property
    def stored(self) -> dict[str, StoredTensor]:
        """Its tensors by canonical name."""
        tensors = {f"{self.name}.weight": self.codes, f"{self.name}.weight_scale": self.scale}
        if self.input_scale is not None:
            tensors[f"{self.name}.input_scale"] = self.input_scale
        return tensors

    def scales(self) -> npt.NDArray[np.float32]:
        """The scale of each output channel, [N]."""
        return np.broadcast_to(read_scales(self.scale), self.codes.shape[:1]).copy()


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight of the model that is stored quantized.

    Attributes:
        shape: of the weight, [N, K] or [E, N, K].
        parts: in the order of their rows: one for a dense weight; gate and up of each expert, or down of each.
    """

    shape: tuple[int, ...]
    parts: tuple[QuantizedPart, ...]

    @property
    def input_amax(self) -> float | None:
        """Largest magnitude of the activations, by the static scales of all parts; None where one has none."""
        scales = [part.input_scale for part in self.parts]
        if any(scale is None for scale in scales):
            return None
        return max(float(read_scales(scale)[0]) * FP8_MAX for scale in scales if scale is not None)


def quantization_of(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Which scheme the weights of a checkpoint are quantized by, in a few words; None for plain weights.

    Args:
        folder: the checkpoint's.
        config: its parsed ``config.json``.

    Raises:
        CheckpointError: a scheme that is not read; names file and scheme.
    """
    text = config.get("text_config") or {}
    found = [
        _checked_scheme(folder / CONFIG_FILE, values)
        for values in (config.get("quantization_config"), text.get("quantization_config"))
        if values is not None
    ]
    file = folder / MODELOPT_FILE
    if file.is_file():
        values = read_json(file).get("quantization")
        if isinstance(values, Mapping) and values.get("quant_algo"):
            values = {"quant_method": "modelopt", **values}
        found.append(_checked_scheme(file, values))
    if len(set(found)) > 1:
        raise CheckpointError(
            f"{folder}: the checkpoint is said to be quantized by {' and by '.join(found)}",
            expected=f"one scheme in {CONFIG_FILE} and {MODELOPT_FILE}",
        )
    return found[0] if found else None


def _checked_scheme(file: Path, values: Any) -> str:
    values = values if isinstance(values, Mapping) else {}
    if isinstance(values.get("quantization"), Mapping):
        # As older versions of modelopt nest it.
        values = {**values, **values["quantization"]}
    method, algorithm = values.get("quant_method"), values.get("quant_algo")
    if method == "modelopt" and algorithm in _MODELOPT_ALGORITHMS:
        return f"modelopt {algorithm}"
    if method == "compressed-tensors":
        _check_compressed_tensors(file, values)
        return "compressed-tensors float-quantized"
    raise _refusal(file, algorithm or method or "unnamed scheme", None)


def _refusal(file: Path, scheme: Any, because: str | None) -> CheckpointError:
    reason = f", {because}" if because else ""
    return CheckpointError(
        f"{file}: the checkpoint is quantized ({scheme!r}){reason}, which is not read",
        expected=_READ,
        fix="give such a checkpoint, or the original one in bfloat16",
    )


def _check_compressed_tensors(file: Path, values: Mapping[str, Any]) -> None:
    """Refuses what would be read as FP8 and is something else."""
    form = values.get("format")
    if form not in ("float-quantized", "naive-quantized"):
        raise _refusal(file, form or "compressed-tensors", None)
    for key in ("sparsity_config", "transform_config"):
        further = values.get(key)
        if further and not (isinstance(further, Mapping) and further.get("format") == "dense"):
            raise _refusal(file, form, f"with {key}")
    groups = values.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise _refusal(file, form, "without config_groups")
    for name, group in groups.items():
        group = group if isinstance(group, Mapping) else {}
        weights, inputs = group.get("weights"), group.get("input_activations")
        where = f"config_groups.{name}" if str(name).isprintable() else "config_groups"
        if not _is_fp8(weights, ("channel", "tensor")) or weights.get("dynamic"):
            raise _refusal(file, form, f"whose {where}.weights are {_summary(weights)}")
        if inputs is not None and not (
            _is_fp8(inputs, ("token", "tensor")) and bool(inputs.get("dynamic")) == (inputs["strategy"] == "token")
        ):
            raise _refusal(file, form, f"whose {where}.input_activations are {_summary(inputs)}")
        if group.get("output_activations") is not None:
            raise _refusal(file, form, f"with {where}.output_activations")
        if group.get("format") not in (None, "float-quantized", "naive-quantized"):
            raise _refusal(file, group["format"], None)


def _is_fp8(arguments: Any, strategies: tuple[str, ...]) -> TypeGuard[Mapping[str, Any]]:
    return (
        isinstance(arguments, Mapping)
        and (arguments.get("num_bits"), arguments.get("type")) == (8, "float")
        and arguments.get("strategy") in strategies
        and arguments.get("symmetric", True) is True
        and not arguments.get("group_size")
        and not arguments.get("block_structure")
    )


def _summary(arguments: Any) -> str:
    """What an untrusted config says about a group of weights, in a line."""
    if not isinstance(arguments, Mapping):
        return repr(arguments)[:80]
    keys = ("num_bits", "type", "strategy", "symmetric", "group_size", "dynamic")
    return ", ".join(f"{key}={arguments[key]!r}"[:40] for key in keys if arguments.get(key) is not None) or "empty"


def take_quantized(
    text: Mapping[str, StoredTensor],
    expected: Mapping[str, tuple[int, ...]],
    canonical_name: Callable[[str], str],
    listing: Path,
    same_bytes: Callable[[StoredTensor, StoredTensor], bool],
) -> tuple[dict[str, StoredTensor], dict[str, QuantizedWeight]]:
    """Finds the quantized weights among the stored tensors of a checkpoint with a scheme.

    Args:
        text: the text model's stored tensors by stored name.
        expected: shapes of the model's weights by canonical name.
        canonical_name: maps stored names to canonical ones.
        listing: the file that lists all tensors, for errors.
        same_bytes: compares the copies of a tensor that is stored more than once.

    Returns:
        The remaining tensors by stored name, and the quantized weights by canonical name.

    Raises:
        CheckpointError: a part of a weight is missing, left over or misshapen, has another dtype or scales that are
            not finite and positive; names tensor and file.
    """
    names = {stored: canonical_name(stored) for stored in text}
    layers_of = {stored: name.rpartition(".")[::2] for stored, name in names.items()}
    quantized_layers = {
        layer
        for stored, (layer, suffix) in layers_of.items()
        if suffix in _SUFFIXES
        and (
            _EXPERT.fullmatch(layer)
            or (_LINEAR.fullmatch(layer) and (suffix != "weight" or text[stored].dtype == CODES_DTYPE))
        )
    }
    plain: dict[str, StoredTensor] = {}
    layers: dict[str, _Layer] = {}
    # The canonical name itself comes first, so that a copy never replaces the original.
    for stored in sorted(text, key=lambda stored: (stored != names[stored], stored)):
        layer, suffix = layers_of[stored]
        if _KV_CACHE_SCALE.fullmatch(names[stored]):
            continue
        if layer not in quantized_layers or suffix not in _SUFFIXES:
            plain[stored] = text[stored]
            continue
        original, kept = layers.setdefault(layer, {}).setdefault(suffix, (stored, text[stored]))
        if not same_bytes(kept, text[stored]):
            raise CheckpointError(
                f"{stored} in {text[stored].file} differs from {original} in {kept.file}",
                expected="equal copies: the model shares this tensor",
            )
    parts: dict[str, dict[int, QuantizedPart]] = {}
    for layer, tensors in layers.items():
        weight, index = _place(layer)
        parts.setdefault(weight, {})[index] = _part(layer, weight, index, tensors, expected, listing)
    both = next((stored for stored in plain if names[stored] in parts), None)
    if both is not None:
        raise CheckpointError(f"{both} in {plain[both].file} is stored a second time, expert by expert")
    quantized: dict[str, QuantizedWeight] = {}
    for weight in expected:
        if weight in parts:
            shape = expected[weight]
            missing = [name for index, name in enumerate(_layer_names(weight, shape)) if index not in parts[weight]]
            if missing:
                more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
                raise CheckpointError(
                    f"{missing[0]}.weight{more} missing from {listing}", fix="fetch the checkpoint again"
                )
            quantized[weight] = QuantizedWeight(shape, tuple(part for _, part in sorted(parts[weight].items())))
    return plain, quantized


def _place(layer: str) -> tuple[str, int]:
    """Canonical name of the weight that a linear layer is a part of, and which part."""
    expert = _EXPERT.fullmatch(layer)
    if expert is None:
        return f"{layer}.weight", 0
    if expert[3] == "down":
        return f"{expert[1]}.down_proj", int(expert[2])
    return f"{expert[1]}.gate_up_proj", 2 * int(expert[2]) + (expert[3] == "up")


def _layer_names(weight: str, shape: tuple[int, ...]) -> list[str]:
    """Names of the linear layers that a weight is stored as, in the order of their rows."""
    if len(shape) == 2:
        return [weight.removesuffix(".weight")]
    experts, _, projection = weight.rpartition(".")
    names = ("gate_proj", "up_proj") if projection == "gate_up_proj" else (projection,)
    return [f"{experts}.{expert}.{name}" for expert in range(shape[0]) for name in names]


def _part(
    layer: str, weight: str, index: int, tensors: _Layer, expected: Mapping[str, tuple[int, ...]], listing: Path
) -> QuantizedPart:
    """The checked part that the tensors of a linear layer make."""
    first, found = next(iter(tensors.values()))
    *outer, rows, places = expected.get(weight, (0, 0, 0))
    parts_of_expert = 2 if weight.endswith(".gate_up_proj") else 1
    if weight not in expected or index >= parts_of_expert * math.prod(outer):
        raise CheckpointError(
            f"{first} in {found.file}: the model of {CONFIG_FILE} has no such tensor",
            fix=f"check that {CONFIG_FILE} belongs to these weights",
        )
    for suffix in ("weight", "weight_scale"):
        if suffix not in tensors:
            raise CheckpointError(
                f"{layer}.{suffix} missing from {listing}, where {first} is", fix="fetch the checkpoint again"
            )
    stored, codes = tensors["weight"]
    shape = (rows // parts_of_expert, places)
    if codes.shape != shape:
        raise CheckpointError(
            f"{stored} in {codes.file} has shape {list(codes.shape)}", expected=f"{list(shape)}, by {CONFIG_FILE}"
        )
    if codes.dtype != CODES_DTYPE:
        raise CheckpointError(
            f"{stored} in {codes.file} is stored as {codes.dtype} beside a scale", expected=CODES_DTYPE
        )
    _check_scales(*tensors["weight_scale"], ((), (1,), (1, 1), shape[:1], (shape[0], 1)))
    if "input_scale" in tensors:
        _check_scales(*tensors["input_scale"], ((), (1,), (1, 1)))
    return QuantizedPart(layer, codes, tensors["weight_scale"][1], tensors.get("input_scale", ("", None))[1])


def _check_scales(name: str, tensor: StoredTensor, shapes: tuple[tuple[int, ...], ...]) -> None:
    where = f"{name} in {tensor.file}"
    if tensor.shape not in shapes:
        raise CheckpointError(
            f"{where} has shape {list(tensor.shape)}", expected=f"{' or '.join(str(list(shape)) for shape in shapes)}"
        )
    if tensor.dtype not in _SCALE_DTYPES:
        raise CheckpointError(f"{where} is stored as {tensor.dtype}", expected=f"one of {', '.join(_SCALE_DTYPES)}")
    values = read_scales(tensor)
    wrong = values[~(np.isfinite(values) & (values > 0))]
    if wrong.size:
        raise CheckpointError(
            f"{where} holds the scale {wrong[0]:g}",
            expected="finite scales above 0",
            fix="quantize the checkpoint again, with calibration that reaches this layer",
        )


def read_scales(tensor: StoredTensor) -> npt.NDArray[np.float32]:
    """The numbers of a stored scale, flat; dtype F32, BF16 or F16.

    Raises:
        CheckpointError: the file shrank or vanished since its header was read.
    """
    try:
        with tensor.file.open("rb") as file:
            file.seek(tensor.offset)
            data = file.read(tensor.nbytes)
    except OSError as problem:
        raise CheckpointError(f"{tensor.file} cannot be read: {problem.strerror}") from problem
    if len(data) != tensor.nbytes:
        raise CheckpointError(f"{tensor.file} became shorter")
    if tensor.dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, "<f4" if tensor.dtype == "F32" else "<f2").astype(np.float32)
