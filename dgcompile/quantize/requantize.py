"""Published quantized weights on their way into a store: taken as they are, or made floating-point numbers again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from dgcompile.checkpoint import Checkpoint
from dgcompile.errors import CheckpointError, RecipeError
from dgcompile.published import QuantizedPart, QuantizedWeight
from dgcompile.quantize.formats import FORMATS, SCALE
from dgcompile.recipe import Recipe, WeightRecipe, weight_class
from dgcompile.safetensors_file import StoredTensor


def refuse_second_rounding(checkpoint: Checkpoint, recipe: Recipe) -> None:
    """Refuses a recipe that would round quantized weights to yet another format.

    Raises:
        RecipeError: names the class of weight.
    """
    for name in checkpoint.quantized:
        kind = weight_class(name)
        how = recipe.weights.of(kind)
        if how.format not in ("fp8", "fp32", "bf16"):
            raise RecipeError(
                f"recipe {recipe.name!r} stores {kind} as {how.format}, and {checkpoint.path} has them in FP8 already "
                f"({checkpoint.quantization}): they would be rounded twice",
                expected="fp8, bf16 or fp32",
                fix="choose such a recipe, or give the original checkpoint",
            )


def published_parts(
    weight: QuantizedWeight, recipe: WeightRecipe, hashes: dict[str, str]
) -> Iterator[dict[str, Tensor]]:
    """The parts of a store that a published weight becomes, a few rows at a time.

    Into fp8 the codes go byte for byte, and the scales as they are: one for a whole tensor is repeated for each of its
    channels. Into floating-point formats go codes times scale.

    Args:
        weight: where its parts lie.
        recipe: of its class; "fp8", "fp32" or "bf16".
        hashes: filled with the SHA-256 of each stored tensor that was read, by its name in ``Checkpoint.stored``.

    Raises:
        CheckpointError: a code is no number, a file changed or ended early.
        ValueError: a value does not fit the format.
    """
    for part in weight.parts:
        codes = _codes(part, hashes)
        scales = torch.from_numpy(part.scales())
        if recipe.format == "fp8":
            yield {"": codes, SCALE: scales.float()}
        else:
            yield FORMATS[recipe.format].encode(codes.float().mul_(scales[:, None]), 0, "")


def _codes(part: QuantizedPart, hashes: dict[str, str]) -> Tensor:
    """The E4M3 codes [N, K] of a part; the hashes of it and of its scales go into ``hashes``."""
    data = {name: _bytes(name, tensor) for name, tensor in part.stored.items()}
    hashes |= {name: hashlib.sha256(found).hexdigest() for name, found in data.items()}
    name = f"{part.name}.weight"
    codes = torch.frombuffer(data[name], dtype=torch.float8_e4m3fn).view(part.codes.shape)
    if not bool(codes.float().isfinite().all()):
        raise CheckpointError(f"{name} in {part.codes.file} holds NaN", fix="fetch the checkpoint again")
    return codes


def _bytes(name: str, tensor: StoredTensor) -> bytearray:
    try:
        with tensor.file.open("rb") as file:
            file.seek(tensor.offset)
            data = bytearray(file.read(tensor.nbytes))
    except OSError as problem:
        raise CheckpointError(f"{name} in {tensor.file} cannot be read: {problem.strerror}") from problem
    if len(data) != tensor.nbytes:
        raise CheckpointError(f"{tensor.file} became shorter: {name} ends {tensor.nbytes - len(data)} bytes early")
    return data
