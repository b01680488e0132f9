"""The time of one denoising step from bytes and multiply-adds: the roofline model (Williams, Waterman and Patterson,
"Roofline: an insightful visual performance model", CACM 2009). An estimate: no kernel reaches a card's peaks.

Two figures come out. The *floor* is what no implementation can be faster than: every weight and the KV cache read once,
every multiply-add at the rate of its precision, all of it at the same time. The *estimate* takes one kind of work after
another, each at the slower of its two limits, with what this graph moves besides: the embedding is read for the lookup
and by two products, and the logits go through memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from dgcompile.model_spec import ModelSpec
from dgcompile.plan.activations import vocabulary_traffic
from dgcompile.plan.weights import bytes_of, is_in_graph, parameters_of
from dgcompile.plan.workload import Workload
from dgcompile.recipe import WeightClass, weight_of
from dgcompile.target import Precision
from dgcompile.weights_store import Store

Binding = Literal["memory", "compute"]

WORK = (
    "experts",
    "attention",
    "dense_mlp",
    "self_conditioning",
    "router",
    "norms",
    "attention_scores",
    "embedding",
    "sampling",
)
"""Kinds of work: those of a class of weight have its name; the scores read the KV cache; ``embedding`` is the lookup,
the logits and the soft embeddings; ``sampling`` reads and writes the logits."""

_PRECISIONS: Mapping[str, Precision] = {"float32": "fp32", "bfloat16": "bf16"}


@dataclass(frozen=True)
class Work:
    """One kind of work of a denoising step.

    Attributes:
        weight_bytes: of weights, each read once.
        other_bytes: what else moves through device memory: further readings of a weight, the KV cache, the logits.
        flops: a multiply-add is two.
        precision: of the numbers that are multiplied.
        seconds: at the slower of the two limits.
        binding: which that is.
    """

    weight_bytes: float
    other_bytes: float
    flops: float
    precision: Precision
    seconds: float
    binding: Binding


@dataclass(frozen=True)
class StepTime:
    """Seconds of a denoising step of a full batch, by arithmetic.

    Attributes:
        work: by kind, see :data:`WORK`.
        memory_seconds: of reading every weight and the KV cache once.
        compute_seconds: of all multiply-adds.
        seconds: the estimate: the sum over all work.
        tokens_per_step: tokens of a finished text that one step gives each row; an assumption.
        rows: B.
    """

    work: Mapping[str, Work]
    memory_seconds: float
    compute_seconds: float
    seconds: float
    tokens_per_step: float
    rows: int

    @property
    def floor_seconds(self) -> float:
        """What no implementation can be faster than."""
        return max(self.memory_seconds, self.compute_seconds)

    @property
    def binding(self) -> Binding:
        """What the floor comes from."""
        return "memory" if self.memory_seconds >= self.compute_seconds else "compute"

    def tokens_per_second(self, seconds: float) -> float:
        """Tokens per second of all rows where a step takes ``seconds``; prompts and commits of canvases not counted."""
        return self.rows * self.tokens_per_step / seconds


def experts_touched(experts: int, top_k: int, tokens: int) -> float:
    """Experts that at least one of ``tokens`` tokens is sent to, if each chooses ``top_k`` of them evenly: the expected
    number, E (1 - (1 - k/E)^T)."""
    return experts * (1 - (1 - top_k / experts) ** tokens)


def lacking_facts(workload: Workload) -> str | None:
    """What the target does not state and the time of a step needs; None when it states everything."""
    target = workload.target
    if target.memory_bandwidth is None:
        return "memory_bandwidth"
    precisions = {_precision(workload, kind) for kind in parameters_of(workload.spec)}
    missing = sorted(precision for precision in precisions if precision not in target.flops)
    return f"flops.{missing[0]}" if missing else None


def step_time(workload: Workload, store: Store, tokens_per_step: float) -> StepTime | None:
    """The time of a denoising step of ``max_batch`` rows whose caches are full but for the canvas.

    Args:
        workload: what is planned.
        store: its weights.
        tokens_per_step: tokens of a finished text that one step gives each row.

    Returns:
        None where the target does not state what it needs, see :func:`lacking_facts`.
    """
    bandwidth, rates = workload.target.memory_bandwidth, workload.target.flops
    if bandwidth is None or lacking_facts(workload) is not None:
        return None
    work: dict[str, Work] = {}
    for kind, (weight_bytes, other_bytes, flops, precision) in _amounts(workload, store).items():
        reading, multiplying = (weight_bytes + other_bytes) / bandwidth, flops / rates[precision]
        binding: Binding = "memory" if reading >= multiplying else "compute"
        work[kind] = Work(weight_bytes, other_bytes, flops, precision, max(reading, multiplying), binding)
    once = sum(part.weight_bytes for part in work.values()) + work["attention_scores"].other_bytes
    return StepTime(
        work=work,
        memory_seconds=once / bandwidth,
        compute_seconds=sum(part.flops / rates[part.precision] for part in work.values()),
        seconds=sum(part.seconds for part in work.values()),
        tokens_per_step=tokens_per_step,
        rows=workload.max_batch,
    )


def _precision(workload: Workload, kind: WeightClass | None) -> Precision:
    """What the products of a class of weight (None: of attention) multiply: FP8 where activations are rounded to it,
    else what activations are computed in, since the weights are converted to that."""
    if kind is not None and workload.recipe.weights.of(kind).activations != "none":
        return "fp8"
    return _PRECISIONS[workload.recipe.computes_in]


def _amounts(workload: Workload, store: Store) -> dict[str, tuple[float, float, float, Precision]]:
    """Per kind of work: bytes of weights, other bytes, FLOPs, precision."""
    spec, tokens, item = workload.spec, workload.canvas_tokens, workload.item_bytes
    stored, past = bytes_of(store), max(0, workload.max_context - spec.canvas_length)
    # The encoder's layer scalars are no part of a step.
    scalars = sum(t.nbytes for name, t in store.tensors.items() if not is_in_graph(weight_of(name), "denoiser", spec))
    touched = experts_touched(spec.num_experts, spec.top_k_experts, tokens) / spec.num_experts
    flops = step_flops(spec, workload.max_batch, past)
    amounts: dict[str, tuple[float, float, float, Precision]] = {}
    kinds: tuple[WeightClass, ...] = ("experts", "attention", "dense_mlp", "self_conditioning", "router", "norms")
    for kind in kinds:
        share = touched if kind == "experts" else 1
        size = stored[kind] - (scalars if kind == "norms" else 0)
        amounts[kind] = (size * share, 0, flops[kind], _precision(workload, kind))

    cache_bytes = 0
    for index, layer in enumerate(spec.layers):
        read = cached_tokens(spec, index, past)
        cache_bytes += workload.max_batch * 2 * read * layer.num_key_value_heads * layer.head_dim * item
    amounts["attention_scores"] = (0, cache_bytes, flops["attention_scores"], _precision(workload, None))

    table = stored["embedding"]
    lookup = tokens * table / spec.vocab_size
    # The logits read the table once more than the floor allows for: once for them, once for the soft embeddings.
    amounts["embedding"] = (table, table + lookup, flops["embedding"], _precision(workload, "embedding"))
    amounts["sampling"] = (0, vocabulary_traffic(workload), flops["sampling"], _precision(workload, None))
    return amounts


def step_flops(spec: ModelSpec, rows: int, past: int) -> dict[str, float]:
    """FLOPs of one denoising step by kind of work, see :data:`WORK`; a multiply-add is two. Products only: norms and
    sampling count as none.

    Args:
        spec: the model.
        rows: B.
        past: tokens that each row's cache holds.
    """
    tokens, parameters = rows * spec.canvas_length, parameters_of(spec)
    counts = dict.fromkeys(WORK, 0.0)
    kinds: tuple[WeightClass, ...] = ("experts", "attention", "dense_mlp", "self_conditioning", "router")
    for kind in kinds:
        share = spec.top_k_experts / spec.num_experts if kind == "experts" else 1
        counts[kind] = 2 * tokens * parameters[kind] * share
    for index, layer in enumerate(spec.layers):
        seen = cached_tokens(spec, index, past) + spec.canvas_length
        # Scores and their product with the values: two products of D for each query and key, two FLOPs each.
        counts["attention_scores"] += 4 * tokens * spec.num_attention_heads * layer.head_dim * seen
    # The logits, and the soft embeddings that the next step reads.
    counts["embedding"] = 2 * 2 * tokens * spec.vocab_size * spec.hidden_size
    return counts


def cached_tokens(spec: ModelSpec, layer: int, past: int) -> int:
    """Tokens of ``past`` that a layer's cache holds."""
    return min(past, spec.layers[layer].window or past)
