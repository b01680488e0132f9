"""MixtureOfExperts in nodes that ONNX Runtime runs fast on a CPU; what it means: ``dgcompile.plugins.moe``.

Tokens are sorted by expert, gathered to one table per group of neighbouring experts, [experts, rows, H], and multiplied
in one batched product per group. A table has as many rows as the busiest expert of its group needs: with one table for
all experts, a single busy expert would make all others pay. The groups' weights are parts of the stored tensors, so
they cost nothing; a batched product keeps all threads busy, where products of single experts are too small for that.

Packed weights are unpacked group by group, just before they are multiplied.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import onnx_ir as ir

from dgcompile.build.onnxruntime.matching import made_by
from dgcompile.build.onnxruntime.unpacking import Unpacked, unpack
from dgcompile.build.onnxruntime.writer import Writer, take_over, view

MOST_GROUPS = 8
"""Groups of a layer at most: each costs a dozen nodes."""


def write_experts(graph: ir.Graph) -> int:
    """Replaces the MixtureOfExperts nodes; returns how many there were."""
    nodes = [node for node in graph if node.op_type == "MixtureOfExperts"]
    for node in nodes:
        _write(graph, node)
    return len(nodes)


def groups_of(experts: int, most: int = MOST_GROUPS) -> list[tuple[int, int]]:
    """The experts [first, end) of each group: sizes differ by one at most."""
    count = min(most, experts)
    bounds = [experts * number // count for number in range(count + 1)]
    return list(pairwise(bounds))


def _write(graph: ir.Graph, node: ir.Node) -> None:
    hidden, expert_ids, expert_weights, gate_up, down, *scales = node.inputs
    assert hidden is not None and gate_up is not None and down is not None and expert_ids is not None
    assert gate_up.shape is not None and hidden.shape is not None and expert_ids.shape is not None
    experts, width, top_k = gate_up.shape[0], hidden.shape[-1], expert_ids.shape[-1]
    assert isinstance(experts, int) and isinstance(width, int) and isinstance(top_k, int)
    weight_format = node.attributes.get_string("weight_format")
    group_size = node.attributes.get_int("group_size")
    groups = groups_of(experts)
    write = Writer(graph, node.name or "experts")
    order = _Order(write, expert_ids, groups, top_k)

    results: list[ir.Value] = []
    for (first, end), tokens in zip(groups, order.tables(write), strict=True):
        count = end - first
        x = write("Gather", hidden, tokens, axis=0)  # [count, C, H]
        both = _product(write, graph, x, gate_up, scales[:1], first, count, weight_format, group_size)
        gate, up = write.several(2, "Split", both, axis=2, num_outputs=2)
        inner = write("Mul", write("Gelu", gate, approximate="tanh"), up)
        result = _product(write, graph, inner, down, scales[1:], first, count, weight_format, group_size)
        results.append(write("Reshape", result, write.ints(-1, width)))
    joined = write("Concat", *results, axis=0) if len(results) > 1 else results[0]
    choices = write("Gather", joined, order.places(write), axis=0)  # [T, K, H]
    weights = write("Unsqueeze", expert_weights, write.ints(1))  # [T, 1, K]
    output = write("Squeeze", write("MatMul", weights, choices), write.ints(1))
    write.put_before(node)
    take_over(node.outputs[0], output)


class _Order:
    """The T * K choices sorted by expert, ties by token, and where each one's result lies.

    A group's table has a row for each of its experts, of as many columns as its busiest expert has tokens.
    """

    def __init__(self, write: Writer, expert_ids: ir.Value, groups: Sequence[tuple[int, int]], top_k: int) -> None:
        self._sizes = [end - first for first, end in groups]
        self._top_k = top_k
        experts = sum(self._sizes)
        group_of = [number for number, size in enumerate(self._sizes) for _ in range(size)]
        place_in = [place for size in self._sizes for place in range(size)]

        ids = write("Cast", write("Reshape", expert_ids, write.ints(-1)), to=ir.DataType.INT64)
        size = write("Shape", ids)
        count = write("Squeeze", size)
        self._numbers = write("Range", write.integer(0), count, write.integer(1))
        keys = write("Add", write("Mul", ids, count), self._numbers)
        ascending, _ = write.several(2, "TopK", keys, size, axis=0, largest=0, sorted=1)
        self._expert = write("Div", ascending, count)
        self._choice = write("Sub", ascending, write("Mul", self._expert, count))
        self._token = write("Div", self._choice, write.integer(top_k))
        self._last = write("Sub", count, write.integer(1))

        none = write("Expand", write.integer(0), write.ints(experts))
        one_each = write("Expand", write.integer(1), size)
        counts = write("ScatterElements", none, ids, one_each, axis=0, reduction="add")
        self._begins = write("CumSum", counts, write.integer(0), exclusive=1)  # [E], in sorted order
        # At least one column, so that no axis is empty.
        narrow = write("Expand", write.integer(1), write.ints(len(groups)))
        self._columns = write("ScatterElements", narrow, write.ints(*group_of), counts, axis=0, reduction="max")  # [G]
        taken = write("CumSum", write("Mul", self._columns, write.ints(*self._sizes)), write.integer(0), exclusive=1)
        own, start = (write("Gather", of_group, write.ints(*group_of)) for of_group in (self._columns, taken))
        self._results = write("Add", write("Mul", own, write.ints(*place_in)), start)  # [E], among all results

    def tables(self, write: Writer) -> Iterator[ir.Value]:
        """Per group, the tokens of its experts, int64 [experts, C].

        Columns beyond an expert's own hold a token of another one; what comes of them is never read.
        """
        count = len(self._sizes)
        by_row = write("Unsqueeze", self._begins, write.ints(1))
        begins = write.several(count, "Split", by_row, write.ints(*self._sizes), axis=0) if count > 1 else [by_row]
        columns = (
            write.several(count, "Split", self._columns, axis=0, num_outputs=count) if count > 1 else [self._columns]
        )
        for begin, column in zip(begins, columns, strict=True):
            within = write("Range", write.integer(0), write("Squeeze", column), write.integer(1))
            places = write("Min", write("Add", begin, within), self._last)
            yield write("Gather", self._token, places, axis=0)

    def places(self, write: Writer) -> ir.Value:
        """Where each choice's result lies among all results, int64 [T, K]."""
        shift = write("Sub", self._results, self._begins)
        by_order = write("Add", write("Gather", shift, self._expert), self._numbers)
        by_choice = write("ScatterElements", by_order, self._choice, by_order, axis=0)
        return write("Reshape", by_choice, write.ints(-1, self._top_k))


def _product(
    write: Writer,
    graph: ir.Graph,
    x: ir.Value,
    weight: ir.Value,
    scales: list[ir.Value | None],
    first: int,
    count: int,
    weight_format: str,
    group_size: int,
) -> ir.Value:
    """Rows [count, C, K] times the weights of the experts from ``first`` on, float32 [count, C, N]."""
    if weight_format == "float":
        return write("FusedMatMul", x, _part(write, graph, weight, first, count), transB=1)
    (scale,) = scales
    assert scale is not None
    codes, own = (_part(write, graph, stored, first, count) for stored in (weight, scale))
    unpacked: Unpacked = unpack(write, x, codes, own, weight_format, group_size)
    return write("FusedMatMul", unpacked.rows, unpacked.weight, transB=1)


def _part(write: Writer, graph: ir.Graph, weight: ir.Value, first: int, count: int) -> ir.Value:
    """The weights of some experts. Where the traced graph casts all of a layer's, only these are cast."""
    cast = made_by(weight, "Cast")
    stored = weight if cast is None else cast.inputs[0]
    assert stored is not None and stored.shape is not None
    shape = (count, *(int(axis) for axis in stored.shape[1:] if isinstance(axis, int)))
    name = f"{stored.name}[{first}:{first + count}]"
    part = view(graph, stored, name, shape, first * math.prod(shape[1:]))
    return part if cast is None else write("Cast", part, to=cast.attributes.get_int("to", 0))
