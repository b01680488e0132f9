"""Target: what dgcompile builds for. Each is a YAML file of facts in ``dgcompile/targets``, or one of the user's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dgcompile.config_file import data_file_names, find_data_file, read_yaml
from dgcompile.errors import TargetError

Backend = Literal["onnxruntime", "tensorrt", "tensorrt_rtx"]
Precision = Literal["fp32", "tf32", "fp16", "bf16", "fp8", "int8", "fp4"]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Target(BaseModel):
    """A GPU model, or the CPU.

    Attributes:
        name: as ``--target`` takes it.
        title: the product's name.
        backend: what builds and runs the engines.
        compute_capability: CUDA's, such as "9.0"; None off the GPU.
        memory_bytes: device memory; None where it depends on the machine.
        memory_bandwidth: bytes per second; None where it depends on the machine.
        multiprocessors: streaming multiprocessors of the GPU; None off the GPU.
        flops: dense FLOP/s (a multiply-add is two) per precision of the multiplied numbers, accumulated in float32.
        weight_formats: what a recipe may store weights as for this target.
        activation_dtypes: what a recipe may compute in on this target, the usual one first.
        activation_formats: what a recipe may round activations to before a product, beside "none".
        default_recipe: the recipe of a build that names none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.-]*$")]
    title: Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]{1,100}$")]
    backend: Backend
    compute_capability: Annotated[str, Field(pattern=r"^\d+\.\d$")] | None = None
    memory_bytes: Annotated[int, Field(strict=True, gt=0)] | None = None
    memory_bandwidth: Positive | None = None
    multiprocessors: Annotated[int, Field(strict=True, gt=0)] | None = None
    flops: dict[Precision, Positive] = {}
    weight_formats: tuple[str, ...]
    activation_dtypes: Annotated[tuple[Literal["float32", "bfloat16"], ...], Field(min_length=1)]
    activation_formats: tuple[str, ...] = ()
    default_recipe: str

    @model_validator(mode="after")
    def _is_complete(self) -> Target:
        needed = ("compute_capability", "multiprocessors", "memory_bytes")
        lacking = [name for name in needed if getattr(self, name) is None]
        if self.backend != "onnxruntime" and lacking:
            raise ValueError(f"a target of the {self.backend} backend needs {', '.join(lacking)}")
        return self

    @property
    def sm(self) -> int:
        """The compute capability as one number, such as 120.

        Raises:
            TargetError: this is no GPU.
        """
        if self.compute_capability is None:
            raise TargetError(f"target {self.name} is no GPU", expected="a target with a compute_capability")
        major, minor = self.compute_capability.split(".")
        return int(major) * 10 + int(minor)

    @classmethod
    def load(cls, source: str | Path) -> Target:
        """Loads a target by name ("cpu", "h100", "rtx5090") or from a YAML file.

        Raises:
            TargetError: no such target, or a malformed file; names the file and the key.
        """
        file = find_data_file(source, "target", "dgcompile.targets", error=TargetError)
        return read_yaml(file, cls, error=TargetError)


def list_targets() -> list[str]:
    """Names of the targets that come with dgcompile."""
    return data_file_names("dgcompile.targets")
