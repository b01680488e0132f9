"""BlockAttention as a plugin of an engine: attributes, inputs, and the launches of a call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from dgcompile.plugins.block_attention.launch import (
    Mode,
    Shape,
    check,
    choose_splits,
    launches,
    workspace,
    workspace_limit,
)
from dgcompile.plugins.block_attention.tiles import tile_for
from dgcompile.plugins.kernel_library import KernelLibrary
from dgcompile.plugins.operation import Field, Operation, Plan, Tensor, expect_ranks, expect_shapes


@dataclass(frozen=True)
class BlockAttention(Operation):
    """Node ``dgcompile::BlockAttention``, see ``reference.block_attention``.

    Attributes:
        scale: multiplies the scores, positive.
        window: tokens that a query looks back on including itself; 0 = all.
        causal: 1 in the encoder, 0 in the denoiser.

    Inputs: query [B, N, Hq, D], key and value [B, N, Hkv, D], past_key and past_value [B, C, Hkv, D] in bf16 or fp16,
    past_length int32 [B].
    """

    NAME: ClassVar[str] = "BlockAttention"
    FIELDS: ClassVar[Mapping[str, type[Field]]] = {"scale": float, "window": int, "causal": int}

    scale: float
    window: int
    causal: int

    def __post_init__(self) -> None:
        if self.causal not in (0, 1):
            raise ValueError(f"causal is {self.causal}, expected 0 or 1")
        check(Shape(1, 1, 1, 1, 16, 1), self.mode)

    @classmethod
    def from_fields(cls, fields: Mapping[str, Field]) -> BlockAttention:
        """See :meth:`Operation.from_fields`."""
        return cls(scale=float(fields["scale"]), window=int(fields["window"]), causal=int(fields["causal"]))

    def fields(self) -> dict[str, Field]:
        """See :meth:`Operation.fields`."""
        return {"scale": self.scale, "window": self.window, "causal": self.causal}

    @property
    def mode(self) -> Mode:
        """The attributes as the kernels take them."""
        return Mode(self.scale, self.window, bool(self.causal))

    @property
    def inputs(self) -> tuple[str, ...]:
        """See :attr:`Operation.inputs`."""
        return "query", "key", "value", "past_key", "past_value", "past_length"

    def types(self, first: str) -> Mapping[str, tuple[str, ...]]:
        """See :meth:`Operation.types`."""
        return {**dict.fromkeys(self.inputs, (first,)), "past_length": ("i32",)}

    def shape(self, tensors: Mapping[str, Tensor]) -> Shape:
        """Sizes of a call, checked as in :meth:`Operation.check`."""
        expect_ranks(tensors, {**dict.fromkeys(self.inputs, 4), "past_length": 1})
        batch, tokens, heads, head_dim = tensors["query"].shape
        kv_heads, capacity = tensors["key"].shape[2], tensors["past_key"].shape[1]
        block, cache = (batch, tokens, kv_heads, head_dim), (batch, capacity, kv_heads, head_dim)
        expected = {"key": block, "value": block, "past_key": cache, "past_value": cache, "past_length": (batch,)}
        expect_shapes(tensors, expected)
        shape = Shape(batch, tokens, heads, kv_heads, head_dim, capacity)
        check(shape, self.mode)
        return shape

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """See :meth:`Operation.check`."""
        self.shape(tensors)

    def workspace_limit(self, largest: Mapping[str, Tensor], sm: int, multiprocessors: int) -> int:
        """See :meth:`Operation.workspace_limit`."""
        shape = self.shape(largest)
        return workspace_limit(shape, sm, tile_for(sm, shape.head_dim), multiprocessors)

    def plan(self, tensors: Mapping[str, Tensor], library: KernelLibrary, multiprocessors: int) -> Plan:
        """See :meth:`Operation.plan`."""
        shape, dtype = self.shape(tensors), tensors["query"].type
        tile = tile_for(library.sm, shape.head_dim)
        splits = choose_splits(shape, library.sm, tile, multiprocessors)
        return Plan(launches(shape, self.mode, dtype, tile, splits), *workspace(shape, splits))
