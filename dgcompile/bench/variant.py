"""The ways to run transformers, and how the best one is found: each is tried, briefly, and given up when it is clearly
slower than the best so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict

from dgcompile.errors import RequestError

Dtype = Literal["float32", "bfloat16"]
Experts = Literal["eager", "batched_mm", "grouped_mm"]
Attention = Literal["sdpa", "eager"]

COMPILE = "compile"
EAGER_ATTENTION = "eager_attention"

CLEARLY_SLOWER = 1.5
"""Times the best step so far from which on a variant that is warm is given up after two steps."""

FAR_SLOWER = 4.0
"""Times the best step so far from which on a variant is given up while it warms up, and after a single step."""

WORTH_COMPILING = 2.0
"""Times the best step from which on a variant is not compiled: compiling takes minutes, and gains a fifth where it was
measured (docs/cli.md)."""


@dataclass(frozen=True)
class Variant:
    """One way to run transformers.

    Attributes:
        dtype: of weights and activations.
        experts: ``experts_implementation``.
        compiled: whether ``torch.compile`` is applied to the model's ``forward``.
        attention: ``attn_implementation``.
    """

    dtype: Dtype
    experts: Experts
    compiled: bool = False
    attention: Attention = "sdpa"

    @property
    def name(self) -> str:
        """As ``--variant`` takes it: ``float32,grouped_mm,compile``."""
        words: list[str] = [self.dtype, self.experts]
        words += [EAGER_ATTENTION] if self.attention == "eager" else []
        words += [COMPILE] if self.compiled else []
        return ",".join(words)

    @classmethod
    def parse(cls, text: str) -> Variant:
        """The variant of a name; the words may come in any order.

        Raises:
            RequestError: an unknown, missing or repeated word.
        """
        words = [word.strip() for word in text.split(",")]
        dtypes: list[Dtype] = [word for word in get_args(Dtype) if word in words]
        experts: list[Experts] = [word for word in get_args(Experts) if word in words]
        known = {*get_args(Dtype), *get_args(Experts), COMPILE, EAGER_ATTENTION}
        if len(dtypes) != 1 or len(experts) != 1 or set(words) - known or len(set(words)) != len(words):
            raise RequestError(
                f"--variant is {text!r}",
                expected=f"{' or '.join(get_args(Dtype))}, then {' or '.join(get_args(Experts))}, then {COMPILE} and "
                f"{EAGER_ATTENTION} where wanted, such as float32,grouped_mm,{COMPILE}",
            )
        return cls(dtypes[0], experts[0], COMPILE in words, "eager" if EAGER_ATTENTION in words else "sdpa")


def is_hopeless(steps: Sequence[float], best: float, *, warm_up: bool) -> bool:
    """Whether a variant is to be given up.

    Args:
        steps: what its steps took so far, in seconds.
        best: the best step of the variants before it.
        warm_up: whether it is warming up: its steps may then take long for other reasons.
    """
    if not steps:
        return False
    return min(steps) > (FAR_SLOWER if warm_up or len(steps) < 2 else CLEARLY_SLOWER) * best


class Probe(BaseModel):
    """What trying a variant gave.

    Attributes:
        variant: its name.
        step_seconds: median of the steps that were timed; None where it was not run to the end.
        outcome: "ran"; else why not.
        seconds: what the trial took, loading and compiling included.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    variant: str
    step_seconds: float | None
    outcome: str
    seconds: float


def plain_variants() -> list[Variant]:
    """Those that are not compiled. The likely best first: the sooner there is a good one, the sooner others are given
    up."""
    return [
        Variant("float32", "eager"),
        Variant("float32", "grouped_mm"),
        Variant("float32", "batched_mm"),
        Variant("bfloat16", "eager"),
        Variant("bfloat16", "grouped_mm"),
        Variant("bfloat16", "batched_mm"),
    ]


def compiled_variants(plain: dict[Variant, float]) -> list[Variant]:
    """Those that are worth compiling, the fastest first; see :data:`WORTH_COMPILING`.

    Args:
        plain: the steps, in seconds, of those that ran without.
    """
    best = min(plain.values(), default=0.0)
    return [
        Variant(variant.dtype, variant.experts, True, variant.attention)
        for variant, seconds in sorted(plain.items(), key=lambda item: item[1])
        if seconds <= WORTH_COMPILING * best
    ]
