"""Bytes of the KV cache, per kind of layer."""

from __future__ import annotations

from dgcompile.model_spec import LayerKind, ModelSpec
from dgcompile.plan.workload import Workload
from dgcompile.runtime.device_batch import CacheLayout


def kv_cache_bytes(workload: Workload) -> dict[LayerKind, int]:
    """Keys and values of all rows, as sessions allocate them: rings of the window where a layer slides, else
    ``max_context`` slots."""
    return _by_kind(workload.spec, workload.max_batch, workload.max_context, workload.item_bytes, sliding=True)


def new_token_bytes(workload: Workload) -> int:
    """Keys and values of one encoder call, which wait there until the cache can take them."""
    spec, rows = workload.spec, workload.max_batch
    return sum(_by_kind(spec, rows, workload.new_tokens, workload.item_bytes, sliding=False).values())


def _by_kind(spec: ModelSpec, rows: int, tokens: int, item_bytes: int, *, sliding: bool) -> dict[LayerKind, int]:
    sizes: dict[LayerKind, int] = {}
    for group in CacheLayout(spec, rows, tokens, item_bytes, sliding=sliding).groups:
        kind = spec.layers[group.layers[0]].kind
        sizes[kind] = sizes.get(kind, 0) + group.rings * group.pitch
    return sizes
