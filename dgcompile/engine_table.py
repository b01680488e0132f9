"""The tensors of one built engine: what a session binds. Written beside the engine, since an engine built for another
GPU cannot be asked here. No torch, no TensorRT.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dgcompile.config_file import read_bytes, validation_error
from dgcompile.contract import GraphName
from dgcompile.errors import BundleError
from dgcompile.recipe import WeightClass

ENGINES_FOLDER = "engines"
"""Folder of a bundle that holds its engines."""

EngineDType = Literal["float32", "float16", "bfloat16", "float8e4m3fn", "int8", "int32", "bool"]


TABLES: frozenset[WeightClass] = frozenset({"experts", "embedding"})
"""Classes of weight that are inputs of engines as they lie in the store, tensor by tensor, scales included. Dense
weights are inputs too, several to one where they multiply the same value: see :mod:`dgcompile.build.tensorrt.dense`."""


def engine_file(graph: GraphName) -> str:
    """Name of a graph's engine in a bundle."""
    return f"{ENGINES_FOLDER}/{graph}.engine"


def graph_engine_file(graph: GraphName) -> str:
    """Name of a graph rewritten for ONNX Runtime, which a bundle of the cpu target has for an engine."""
    return f"{ENGINES_FOLDER}/{graph}.onnx"


def table_file(graph: GraphName) -> str:
    """Name of the table of an engine's tensors in a bundle."""
    return f"{ENGINES_FOLDER}/{graph}.tensors.json"


def layers_file(graph: GraphName) -> str:
    """Name of the list of an engine's layers, as the builder reported them, in a bundle."""
    return f"{ENGINES_FOLDER}/{graph}.layers.txt"


class Profile(BaseModel):
    """Range of shapes that an input may have: smallest, the one that kernels are chosen for, largest."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    min: tuple[int, ...]
    opt: tuple[int, ...]
    max: tuple[int, ...]


class EngineTensor(BaseModel):
    """One input or output of an engine.

    Attributes:
        name: as the engine knows it.
        mode: which of the two.
        dtype: of its elements. Packed bytes (uint8 in the weights store) are int8 to an engine.
        shape: axes are numbers, or the symbols of the contract.
        profile: of inputs with a symbol in their shape.
        parts: for weights that are bound as inputs, the tensors of the weights store that lie in it one after another.
        transposed: whether the parts, matrices [N_i, K], are laid side by side as [K, sum of N_i] instead.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    mode: Literal["input", "output"]
    dtype: EngineDType
    shape: tuple[int | str, ...]
    profile: Profile | None = None
    parts: tuple[str, ...] = ()
    transposed: bool = False

    @model_validator(mode="after")
    def _is_an_input(self) -> EngineTensor:
        if self.parts and (self.mode != "input" or self.profile is not None):
            raise ValueError(f"{self.name} is made of {self.parts[0]}, so it must be an input of one shape")
        if self.transposed and not self.parts:
            raise ValueError(f"{self.name} is transposed but made of no weights")
        return self


class EngineTable(BaseModel):
    """All tensors of an engine, in its order.

    Attributes:
        graph: which one it runs.
        tensors: its inputs and outputs.
        workspace_bytes: device memory that a run needs beside them, as the builder said; None where it did not.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    graph: GraphName
    tensors: tuple[EngineTensor, ...]
    workspace_bytes: Annotated[int, Field(strict=True, ge=0)] | None = None

    @property
    def weights(self) -> tuple[EngineTensor, ...]:
        """The weights that are bound as inputs."""
        return tuple(tensor for tensor in self.tensors if tensor.parts)

    def to_bytes(self) -> bytes:
        """The table as it lies on disk."""
        return (self.model_dump_json(indent=1) + "\n").encode()

    @classmethod
    def read(cls, path: Path) -> EngineTable:
        """Reads a table.

        Raises:
            BundleError: it is missing or malformed; names the file.
        """
        text = read_bytes(path, error=BundleError)
        try:
            return cls.model_validate_json(text)
        except ValidationError as problem:
            raise validation_error(str(path), problem, cls, error=BundleError) from problem
