"""MixtureOfExperts as a plugin of an engine: attributes, inputs, and the launches of a call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from dgcompile.plugins.kernel_library import KernelLibrary
from dgcompile.plugins.moe.formats import INT4_BLOCK, WeightFormat
from dgcompile.plugins.moe.launch import Shape, check, check_format, launches, tile_for, workspace, workspace_limit
from dgcompile.plugins.operation import ITEMSIZE, Field, Operation, Plan, Tensor, expect_ranks, expect_shapes

ACTIVATION = "gelu_tanh"


@dataclass(frozen=True)
class MixtureOfExperts(Operation):
    """Node ``dgcompile::MixtureOfExperts``, see ``reference.mixture_of_experts``.

    Attributes:
        activation: "gelu_tanh".
        weight_format: of the experts, see :mod:`dgcompile.plugins.moe.formats`.
        group_size: weights that share a scale: 32 or 64 for "int4" and "w4a8", else 0.

    Inputs: hidden [T, H] in bf16 or fp16, expert_ids int32 [T, K], expert_weights float32 [T, K], gate_up and down in
    the weight format (bytes as int8, E4M3 as fp8 or int8); for all formats but "float" gate_up_scale and down_scale.
    """

    NAME: ClassVar[str] = "MixtureOfExperts"
    FIELDS: ClassVar[Mapping[str, type[Field]]] = {"activation": str, "weight_format": str, "group_size": int}

    activation: str
    weight_format: WeightFormat
    group_size: int

    def __post_init__(self) -> None:
        if self.activation != ACTIVATION:
            raise ValueError(f"activation is {self.activation!r}, expected {ACTIVATION!r}")
        check_format(self.weight_format, self.group_size)

    @classmethod
    def from_fields(cls, fields: Mapping[str, Field]) -> MixtureOfExperts:
        """See :meth:`Operation.from_fields`."""
        weight_format: WeightFormat = str(fields["weight_format"])  # type: ignore[assignment]  # checked above
        return cls(str(fields["activation"]), weight_format, int(fields["group_size"]))

    def fields(self) -> dict[str, Field]:
        """See :meth:`Operation.fields`."""
        return {
            "activation": self.activation,
            "weight_format": self.weight_format,
            "group_size": self.group_size,
        }

    @property
    def inputs(self) -> tuple[str, ...]:
        """See :attr:`Operation.inputs`."""
        tensors = ("hidden", "expert_ids", "expert_weights", "gate_up", "down")
        return tensors if self.weight_format == "float" else (*tensors, "gate_up_scale", "down_scale")

    def types(self, first: str) -> Mapping[str, tuple[str, ...]]:
        """See :meth:`Operation.types`."""
        weights: dict[WeightFormat, tuple[str, ...]] = {"float": (first,), "fp8": ("fp8", "i8")}
        weight = weights.get(self.weight_format, ("i8",))
        types = {
            "hidden": (first,),
            "expert_ids": ("i32",),
            "expert_weights": ("fp32",),
            "gate_up": weight,
            "down": weight,
        }
        if self.weight_format != "float":
            scale = ("fp32",) if self.weight_format == "fp8" else ("fp16",)
            types |= {"gate_up_scale": scale, "down_scale": scale}
        return types

    def shape(self, tensors: Mapping[str, Tensor]) -> Shape:
        """Sizes of a call, checked as in :meth:`Operation.check`."""
        packed = self.weight_format in ("int4", "w4a8")
        expect_ranks(tensors, {"hidden": 2, "expert_ids": 2, "gate_up": 4 if packed else 3})
        tokens, hidden = tensors["hidden"].shape
        top_k = tensors["expert_ids"].shape[1]
        experts, rows = tensors["gate_up"].shape[0], tensors["gate_up"].shape[2 if packed else 1]
        if rows % 2:
            raise ValueError(f"gate_up has {rows} rows, expected as many for the gate as for the other half")
        inner = rows // 2
        expected: dict[str, tuple[int, ...]] = {"expert_ids": (tokens, top_k), "expert_weights": (tokens, top_k)}
        for name, outputs, places in (("gate_up", rows, hidden), ("down", hidden, inner)):
            if packed:
                expected[name] = (experts, -(-places // INT4_BLOCK), outputs, INT4_BLOCK // 2)
                expected[f"{name}_scale"] = (experts, -(-places // self.group_size), outputs)
            else:
                expected[name] = (experts, outputs, places)
                if self.weight_format == "fp8":
                    expected[f"{name}_scale"] = (experts, outputs)
        expect_shapes(tensors, expected)
        shape = Shape(tokens, top_k, experts, hidden, inner)
        check(shape, self.weight_format, self.group_size)
        return shape

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """See :meth:`Operation.check`."""
        self.shape(tensors)

    def workspace_limit(self, largest: Mapping[str, Tensor], sm: int, multiprocessors: int) -> int:
        """See :meth:`Operation.workspace_limit`."""
        itemsize = ITEMSIZE[largest["hidden"].type]
        return workspace_limit(self.shape(largest), sm, self.weight_format, itemsize)

    def plan(self, tensors: Mapping[str, Tensor], library: KernelLibrary, multiprocessors: int) -> Plan:
        """See :meth:`Operation.plan`."""
        shape, activations = self.shape(tensors), tensors["hidden"].type
        tile = tile_for(library.sm, self.weight_format, shape)
        steps = launches(shape, self.weight_format, self.group_size, tile, activations)
        return Plan(steps, *workspace(shape, self.weight_format, tile, ITEMSIZE[activations]))
