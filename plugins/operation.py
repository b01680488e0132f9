"""What a plugin of either engine library needs to know about an operation. Neither engine library nor CUDA in here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from dgcompile.plugins.kernel_library import KernelLibrary
from dgcompile.plugins.launch import Launch

Field = int | float | str
ITEMSIZE = {"bf16": 2, "fp16": 2}
"""Types that activations may have in an engine, as Triton names them, and their size in bytes."""


@dataclass(frozen=True)
class Tensor:
    """An input of a plugin: its shape, and its type: "fp32", "fp16", "bf16", "fp8", "i8", "i32" or "i64"."""

    shape: tuple[int, ...]
    type: str


@dataclass(frozen=True)
class Plan:
    """All that one call does.

    Attributes:
        launches: in order. Arguments name inputs, "output" or buffers.
        buffers: offset and size in bytes of each buffer in the workspace.
        workspace_bytes: size of the workspace.
    """

    launches: list[Launch]
    buffers: Mapping[str, tuple[int, int]]
    workspace_bytes: int


class Operation(ABC):
    """One node's attributes, and what follows from them. The output has the first input's shape and type.

    Every method raises ValueError for what the kernels do not compute, and says which tensor or attribute it is.
    """

    NAME: ClassVar[str]
    """Name of plugin and ONNX node."""

    FIELDS: ClassVar[Mapping[str, type[Field]]]
    """Attributes of the node."""

    @classmethod
    @abstractmethod
    def from_fields(cls, fields: Mapping[str, Field]) -> Operation:
        """From the attributes, of which each is there in its type."""

    @abstractmethod
    def fields(self) -> dict[str, Field]:
        """The attributes again."""

    @property
    @abstractmethod
    def inputs(self) -> tuple[str, ...]:
        """Names of the inputs, in order."""

    @abstractmethod
    def types(self, first: str) -> Mapping[str, tuple[str, ...]]:
        """Types that each input may have, where the first one has type ``first``."""

    @abstractmethod
    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Refuses shapes that do not fit each other or that the kernels do not compute."""

    @abstractmethod
    def workspace_limit(self, largest: Mapping[str, Tensor], sm: int, multiprocessors: int) -> int:
        """Bytes of workspace that no call up to the largest shapes exceeds."""

    @abstractmethod
    def plan(self, tensors: Mapping[str, Tensor], library: KernelLibrary, multiprocessors: int) -> Plan:
        """The launches of one call, with kernels of ``library``. BundleError: it lacks one."""

    def check_types(self, types: Mapping[str, str]) -> None:
        """Refuses types that the kernels do not take."""
        first = types[self.inputs[0]]
        if first not in ITEMSIZE:
            raise ValueError(f"{self.inputs[0]} is {first}, expected {' or '.join(ITEMSIZE)}")
        for name, allowed in self.types(first).items():
            if types[name] not in allowed:
                raise ValueError(f"{name} is {types[name]}, expected {' or '.join(allowed)}")


def expect_shapes(tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Refuses tensors whose shapes are others than ``expected``.

    Raises:
        ValueError: names the first of them.
    """
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            raise ValueError(f"{name} has shape {list(tensors[name].shape)}, expected {list(shape)}")


def expect_ranks(tensors: Mapping[str, Tensor], ranks: Mapping[str, int]) -> None:
    """Refuses tensors with another number of axes than expected, see :func:`expect_shapes`."""
    for name, rank in ranks.items():
        if len(tensors[name].shape) != rank:
            raise ValueError(f"{name} has shape {list(tensors[name].shape)}, expected {rank} axes")
