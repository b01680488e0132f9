"""Memory of the device that runs a bundle: what takes how much, and the largest limits that fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dgcompile.contract import GraphName
from dgcompile.model_spec import LayerKind
from dgcompile.plan.activations import activation_bytes
from dgcompile.plan.cache import kv_cache_bytes, new_token_bytes
from dgcompile.plan.weights import EngineWeights, weights_in_engines
from dgcompile.plan.workload import Workload
from dgcompile.runtime.weight_loading import STAGING_BYTES
from dgcompile.weights_store import Store

CONTEXT_BYTES = 500_000_000
"""What CUDA's context, the engine library and the kernels of both take on the device: an allowance, not measured."""

LARGEST_BATCH = 64
"""Rows of a batch that are tried at most; see ``dgcompile.bundle.MAX_BATCH``."""


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on the device while a bundle runs at its limits. On the CPU the device is the machine itself.

    Attributes:
        bound_weights: of weights that are inputs of engines and lie there once.
        engine_weights: of weights inside each engine: small ones, and INT4 ones that are no experts; empty on the CPU.
        kv_cache: by kind of layer.
        new_tokens: of the encoder's results before they are in the cache; zero on the CPU, where they are activations.
        self_conditioning: of the signal, which has two copies.
        small_tensors: of canvases, random numbers and results.
        activations: of the intermediate results of each graph; the larger one counts, for runs follow one another.
        converted_weights: on the CPU, of the largest weight in float32, which is converted when it is multiplied.
        allowance: see :data:`CONTEXT_BYTES`.
        pinned_host: bytes of pinned host memory, which are not on the device.
    """

    bound_weights: int
    engine_weights: Mapping[GraphName, int]
    kv_cache: Mapping[LayerKind, int]
    new_tokens: int
    self_conditioning: int
    small_tensors: int
    activations: Mapping[GraphName, int]
    converted_weights: int
    allowance: int
    pinned_host: int

    @property
    def weights(self) -> int:
        """Of all weights, those of both engines twice."""
        return self.bound_weights + sum(self.engine_weights.values())

    @property
    def workspace(self) -> int:
        """The memory that both engines share for their intermediate results."""
        return max(self.activations.values()) + self.converted_weights

    @property
    def total(self) -> int:
        """All of it."""
        buffers = self.new_tokens + self.self_conditioning + self.small_tensors
        return self.weights + sum(self.kv_cache.values()) + buffers + self.workspace + self.allowance


def device_memory(workload: Workload, store: Store) -> DeviceMemory:
    """What a session of the bundle holds on the device."""
    if workload.on_gpu:
        weights = weights_in_engines(workload.spec, workload.recipe, store)
    else:
        weights = EngineWeights(sum(tensor.nbytes for tensor in store.tensors.values()), {})
    return _memory(workload, store, weights)


def _memory(workload: Workload, store: Store, weights: EngineWeights) -> DeviceMemory:
    spec, rows, tokens = workload.spec, workload.max_batch, workload.canvas_tokens
    # Per row three numbers; per position two canvases, noise, uniform numbers, best tokens, entropies and acceptance.
    small = rows * 3 * 4 + tokens * (6 * 4 + 1) + rows * 4 * (2 + workload.new_tokens)
    converted = 0
    if not workload.on_gpu and workload.recipe.weights.experts.format != "fp32":
        converted = 4 * max(math.prod(weight.shape) for weight in store.weights.values())
    return DeviceMemory(
        bound_weights=weights.bound,
        engine_weights=dict(weights.constants),
        kv_cache=kv_cache_bytes(workload),
        new_tokens=new_token_bytes(workload),
        self_conditioning=2 * tokens * spec.hidden_size * workload.item_bytes,
        small_tensors=small,
        activations=activation_bytes(workload),
        converted_weights=converted,
        allowance=CONTEXT_BYTES if workload.on_gpu else 0,
        pinned_host=2 * STAGING_BYTES + small if workload.on_gpu else 0,
    )


def largest_context(workload: Workload, store: Store, memory_bytes: int) -> int | None:
    """The largest ``max_context`` of the model that fits at this batch; None when not even the smallest does."""
    smallest, largest = workload.spec.canvas_length + 1, workload.spec.max_position_embeddings
    return _largest(smallest, largest, workload, store, memory_bytes, lambda n: workload.sized(max_context=n))


def largest_batch(workload: Workload, store: Store, memory_bytes: int) -> int | None:
    """The largest ``max_batch`` up to :data:`LARGEST_BATCH` that fits at this context; None when not even 1 does."""
    return _largest(1, LARGEST_BATCH, workload, store, memory_bytes, lambda n: workload.sized(max_batch=n))


def _largest(
    smallest: int,
    largest: int,
    workload: Workload,
    store: Store,
    memory_bytes: int,
    sized: Callable[[int], Workload],
) -> int | None:
    """The largest number whose memory fits, by bisection: memory grows with it. The weights do not, and are counted
    once."""
    found = device_memory(workload, store)
    weights = EngineWeights(found.bound_weights, found.engine_weights)

    def fits(number: int) -> bool:
        return _memory(sized(number), store, weights).total <= memory_bytes

    if largest < smallest or not fits(smallest):
        return None
    if fits(largest):
        return largest
    low, high = smallest, largest  # low fits, high does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
