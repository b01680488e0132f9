"""What no implementation of a denoising step in float32 can be faster than on this machine: its multiply-adds at the
rate that a matrix product reaches here, and its weights and KV cache at the bandwidth that a copy reaches here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from dgcompile.model_spec import ModelSpec
from dgcompile.plan.roofline import cached_tokens, experts_touched, step_flops
from dgcompile.plan.weights import parameters_of

ITEM_BYTES = 4
MAX_OPERAND_BYTES = 256 << 20
"""Of the largest matrix that is multiplied. A vocabulary that is longer is cut: the rate does not depend on it."""


class Product(BaseModel):
    """The rate of one matrix product, [m, k] x [k, n] in float32.

    Attributes:
        m, k, n: its shape.
        library: that multiplied.
        flops_per_second: the best of its runs; a multiply-add is two.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    m: int
    k: int
    n: int
    library: str
    flops_per_second: float


class Rates(BaseModel):
    """What this machine reached.

    Attributes:
        when: "begin" or "end" of the measurement.
        copy_bytes_per_second: read and written, of arrays beyond the caches.
        products: by shape and library.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    when: str
    copy_bytes_per_second: float
    products: tuple[Product, ...]


class StepFloor(BaseModel):
    """The floor of a step at one past.

    Attributes:
        past: cached tokens.
        flops: by kind of work.
        bytes: of weights and KV cache in float32, each read once.
        compute_seconds, memory_seconds: what each takes.
        seconds: the longer of the two.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    past: int
    flops: dict[str, float]
    bytes: float
    compute_seconds: float
    memory_seconds: float
    seconds: float


class Floor(BaseModel):
    """The floor of this machine.

    Attributes:
        flops_per_second, bytes_per_second: the best that was reached.
        steps: by past.
        rates: what was reached when.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    flops_per_second: float
    bytes_per_second: float
    steps: tuple[StepFloor, ...]
    rates: tuple[Rates, ...]

    def seconds(self, past: int) -> float:
        """Of a step at a past that was asked for."""
        return next(step.seconds for step in self.steps if step.past == past)


def product_shapes(spec: ModelSpec) -> list[tuple[int, int, int]]:
    """The model's own shapes: logits, soft embeddings, a projection."""
    tokens, hidden = spec.canvas_length, spec.hidden_size
    vocabulary = min(spec.vocab_size, MAX_OPERAND_BYTES // (ITEM_BYTES * hidden))
    return [(tokens, hidden, vocabulary), (tokens, vocabulary, hidden), (tokens, hidden, hidden)]


def step_bytes(spec: ModelSpec, past: int) -> float:
    """Bytes of a step of one row in float32: every weight that it needs, and the KV cache, once each."""
    parameters = dict(parameters_of(spec))
    touched = experts_touched(spec.num_experts, spec.top_k_experts, spec.canvas_length) / spec.num_experts
    weights = sum(count * (touched if kind == "experts" else 1) for kind, count in parameters.items())
    cache = sum(
        2 * cached_tokens(spec, index, past) * layer.num_key_value_heads * layer.head_dim
        for index, layer in enumerate(spec.layers)
    )
    return ITEM_BYTES * (weights + cache)


def floor_of(spec: ModelSpec, pasts: Sequence[int], rates: Sequence[Rates]) -> Floor:
    """The floor from what was reached."""
    flops_rate = max(product.flops_per_second for rate in rates for product in rate.products)
    bytes_rate = max(rate.copy_bytes_per_second for rate in rates)
    steps = []
    for past in pasts:
        flops, size = step_flops(spec, 1, past), step_bytes(spec, past)
        compute, memory = sum(flops.values()) / flops_rate, size / bytes_rate
        steps.append(
            StepFloor(
                past=past,
                flops=flops,
                bytes=size,
                compute_seconds=compute,
                memory_seconds=memory,
                seconds=max(compute, memory),
            )
        )
    return Floor(flops_per_second=flops_rate, bytes_per_second=bytes_rate, steps=tuple(steps), rates=tuple(rates))


def rates_from(values: Mapping[str, Any], when: str) -> Rates:
    """The rates as the worker sent them."""
    return Rates.model_validate({**values, "when": when})
