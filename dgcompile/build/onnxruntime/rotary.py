"""Rotary embeddings as single nodes: seven nodes each in the traced graph."""

from __future__ import annotations

import onnx_ir as ir

from dgcompile.build.onnxruntime.matching import made_by, number_of
from dgcompile.build.onnxruntime.writer import Writer, take_over


def fuse_rotary(graph: ir.Graph) -> int:
    """Replaces ``x * cos + rotate_half(x) * sin`` by com.microsoft.RotaryEmbedding.

    Returns:
        how many there were.
    """
    tables: dict[str, tuple[ir.Value, ir.Value, ir.Value]] = {}  # by the name of the angles
    found = 0
    for node in list(graph):
        parts = _parts(node)
        if parts is None:
            continue
        x, cos = parts
        assert x.shape is not None
        heads, width = x.shape[2], x.shape[3]
        angles = cos.inputs[0]
        assert isinstance(heads, int) and isinstance(width, int) and angles is not None and angles.name is not None
        if angles.name not in tables:
            tables[angles.name] = _tables(graph, angles, width)
        positions, cosines, sines = tables[angles.name]
        write = Writer(graph, f"{node.name}/rotary")
        # [B, N, heads * D], as the operator reads it; its output has the same layout.
        flat = write("Reshape", x, write.ints(0, 0, heads * width))
        rotated = write("RotaryEmbedding", flat, positions, cosines, sines, num_heads=heads, interleaved=0)
        shaped = write("Reshape", rotated, write.ints(0, 0, heads, width))
        write.put_before(node)
        take_over(node.outputs[0], shaped)
        found += 1
    return found


def _tables(graph: ir.Graph, angles: ir.Value, width: int) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Rows of the tables int64 [B, N], and cosine and sine of the angles [B * N, D / 2]."""
    half = made_by(angles, "Concat")
    assert half is not None and half.inputs[0] is half.inputs[1], "each angle serves both halves of a head"
    once = half.inputs[0]
    assert once is not None
    write = Writer(graph, f"{half.name}/tables")
    flat = write("Reshape", once, write.ints(-1, width // 2))
    cosines, sines = write("Cos", flat), write("Sin", flat)
    both = write("Shape", once, start=0, end=2)
    count = write("ReduceProd", both, keepdims=0)
    positions = write("Reshape", write("Range", write.integer(0), count, write.integer(1)), both)
    write.put_before(half)
    return positions, cosines, sines


def _parts(node: ir.Node) -> tuple[ir.Value, ir.Node] | None:
    """What is rotated [B, N, heads, D], and the Cos node, if this node is the last of a rotary embedding."""
    if node.op_type != "Add":
        return None
    straight, turned = (made_by(value, "Mul") for value in node.inputs)
    if straight is None or turned is None:
        return None
    x, cos = straight.inputs[0], _trigonometric(straight.inputs[1], "Cos")
    halves, sin = made_by(turned.inputs[0], "Concat"), _trigonometric(turned.inputs[1], "Sin")
    if x is None or halves is None or cos is None or sin is None or cos.inputs[0] is not sin.inputs[0]:
        return None
    negated, first = made_by(halves.inputs[0], "Neg"), made_by(halves.inputs[1], "Slice")
    second = None if negated is None else made_by(negated.inputs[0], "Slice")
    if first is None or second is None or first.inputs[0] is not x or second.inputs[0] is not x or x.shape is None:
        return None
    width = x.shape[3]
    split = isinstance(width, int) and number_of(first.inputs[2]) == width // 2 == number_of(second.inputs[1])
    return (x, cos) if split else None


def _trigonometric(value: ir.Value | None, kind: str) -> ir.Node | None:
    """The node that made cosines or sines, of which ``value`` is a copy with an axis for the heads."""
    wider = made_by(value, "Unsqueeze")
    return None if wider is None else made_by(wider.inputs[0], kind)
