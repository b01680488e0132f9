"""What is planned for: a model in a recipe on a target, with its most tokens and rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dgcompile.model_spec import ModelSpec
from dgcompile.recipe import Recipe
from dgcompile.runtime.loop import ENCODE_CHUNK
from dgcompile.target import Target

ITEM_BYTES = {"float32": 4, "bfloat16": 2}
"""Bytes of a number that a recipe computes in."""


@dataclass(frozen=True)
class Workload:
    """One planned bundle, at its limits.

    Attributes:
        spec: the model.
        recipe: for the target, see :meth:`Recipe.for_target`.
        target: where it is to run.
        max_context: tokens of a row, prompt and answer.
        max_batch: rows of a call.
    """

    spec: ModelSpec
    recipe: Recipe
    target: Target
    max_context: int
    max_batch: int

    @property
    def item_bytes(self) -> int:
        """Bytes of an activation, and of a number in the KV cache."""
        return ITEM_BYTES[self.recipe.computes_in]

    @property
    def on_gpu(self) -> bool:
        """Whether engines run it, and not ONNX Runtime on the CPU."""
        return self.target.backend != "onnxruntime"

    @property
    def canvas_tokens(self) -> int:
        """Tokens of one denoiser call: B * L."""
        return self.max_batch * self.spec.canvas_length

    @property
    def new_tokens(self) -> int:
        """Most tokens of a row in one encoder call: N, the upper end of the encoder engine's profile."""
        return max(ENCODE_CHUNK, self.spec.canvas_length)

    def sized(self, *, max_context: int | None = None, max_batch: int | None = None) -> Workload:
        """The same with another limit."""
        return replace(self, max_context=max_context or self.max_context, max_batch=max_batch or self.max_batch)
