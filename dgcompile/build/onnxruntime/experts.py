"""MixtureOfExperts in nodes that ONNX Runtime runs fast on a CPU; what it means: ``dgcompile.plugins.moe``.

Tokens are sorted by expert, gathered to one table per group of neighbouring experts, [experts, rows, H], and multiplied
in one batched product per group. A table has as many rows as the busiest expert of its group needs: with one table for
all experts, a single busy expert would make all others pay. The groups' weights are parts of the stored tensors, so
they cost nothing; a batched product keeps all threads busy, where products of single experts are too small for that.

Packed weights are unpacked group by group, just before they are multiplied.
"""

from __future__ import annotations

import math
from itertools import pairwise

import onnx_ir as ir

from dgcompile.build.onnxruntime.matching import made_by
from dgcompile.build.onnxruntime.norms import take_over
from dgcompile.build.onnxruntime.unpacking import Unpacked, unpack
from dgcompile.build.onnxruntime.writer import Writer, view

MOST_GROUPS = 8
"""Groups of a layer at most: each costs some fifteen nodes."""


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
    order = _Order(write, expert_ids, experts, top_k)

    results: list[ir.Value] = []
    places: list[ir.Value] = []  # per group, where the rows of its experts begin among all results
    start: ir.Value | None = None
    for number, (first, end) in enumerate(groups):
        count = end - first
        rows, load = order.rows_of(write, first, end)  # [count * C] token numbers, [1]
        table = write("Gather", hidden, rows, axis=0)
        x = write("Reshape", table, write.ints(count, -1, width))  # [count, C, H]
        both = _product(write, graph, x, gate_up, scales[:1], first, count, weight_format, group_size)
        gate, up = write.several(2, "Split", both, axis=2, num_outputs=2)
        inner = write("Mul", write("Gelu", gate, approximate="tanh"), up)
        result = _product(write, graph, inner, down, scales[1:], first, count, weight_format, group_size)
        results.append(write("Reshape", result, write.ints(-1, width)))
        own = write("Mul", write.ints(*range(count)), load)
        places.append(own if start is None else write("Add", own, start))
        if number + 1 < len(groups):
            taken = write("Mul", load, write.ints(count))
            start = taken if start is None else write("Add", start, taken)
    joined = write("Concat", *results, axis=0) if len(results) > 1 else results[0]
    begins = write("Concat", *places, axis=0) if len(places) > 1 else places[0]  # [E]
    choices = write("Reshape", write("Gather", joined, order.places(write, begins)), write.ints(-1, top_k, width))
    weights = write("Unsqueeze", expert_weights, write.ints(1))  # [T, 1, K]
    output = write("Squeeze", write("MatMul", weights, choices), write.ints(1))
    write.put_before(node)
    take_over(node.outputs[0], output)


class _Order:
    """The T * K choices sorted by expert, ties by token.

    Attributes:
        token: int64 [T * K], whose choice it is.
        expert: int64 [T * K], ascending.
        choice: int64 [T * K], its number among all choices.
        counts: int64 [E].
        begins: int64 [E], the first of an expert's choices.
        last: int64 scalar, T * K - 1.
    """

    def __init__(self, write: Writer, expert_ids: ir.Value, experts: int, top_k: int) -> None:
        ids = write("Cast", write("Reshape", expert_ids, write.ints(-1)), to=ir.DataType.INT64)
        size = write("Shape", ids)
        count = write("Squeeze", size)
        self._numbers = write("Range", write.integer(0), count, write.integer(1))
        keys = write("Add", write("Mul", ids, count), self._numbers)
        ascending, _ = write.several(2, "TopK", keys, size, axis=0, largest=0, sorted=1)
        self.expert = write("Div", ascending, count)
        self.choice = write("Sub", ascending, write("Mul", self.expert, count))
        self.token = write("Div", self.choice, write.integer(top_k))
        none = write("Expand", write.integer(0), write.ints(experts))
        one_each = write("Expand", write.integer(1), size)
        self.counts = write("ScatterElements", none, ids, one_each, axis=0, reduction="add")
        self.begins = write("CumSum", self.counts, write.integer(0), exclusive=1)
        self.last = write("Sub", count, write.integer(1))

    def rows_of(self, write: Writer, first: int, end: int) -> tuple[ir.Value, ir.Value]:
        """Tokens of the experts [first, end), the busiest one's count for each of them, and that count [1].

        Rows beyond an expert's own hold a token of another one; what comes of them is never read.
        """
        bounds = (write.ints(first), write.ints(end), write.ints(0))
        load = write("ReduceMax", write("Slice", self.counts, *bounds), keepdims=1)  # [1]
        # At least one row, so that no axis is empty.
        load = write("Max", load, write.ints(1))
        within = write("Range", write.integer(0), write("Squeeze", load), write.integer(1))
        begin = write("Unsqueeze", write("Slice", self.begins, *bounds), write.ints(1))
        sorted_places = write("Min", write("Add", begin, within), self.last)
        return write("Gather", self.token, write("Reshape", sorted_places, write.ints(-1))), load

    def places(self, write: Writer, begins: ir.Value) -> ir.Value:
        """Where each choice's result lies, int64 [T * K] in the choices' own order.

        Args:
            write: writes the nodes.
            begins: int64 [E], where an expert's results begin.
        """
        shift = write("Sub", begins, self.begins)
        by_order = write("Add", write("Gather", shift, self.expert), self._numbers)
        return write("ScatterElements", by_order, self.choice, by_order, axis=0)


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
