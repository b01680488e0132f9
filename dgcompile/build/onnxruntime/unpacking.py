"""Packed expert weights as float32, and activations rounded as a format wants them: see ``plugins/moe/formats``.

Plain arithmetic on floats: of ONNX Runtime's operators, casts of bytes and sums and products of floats are vectorised;
Where, shifts of bytes, INT4 casts and blocked DequantizeLinear are not, and take ten times as long for each weight.
"""

from __future__ import annotations

from typing import NamedTuple

import onnx_ir as ir

from dgcompile.build.onnxruntime.writer import Writer
from dgcompile.plugins.moe.formats import FP8_MAX, INT4_BLOCK


class Unpacked(NamedTuple):
    """The two factors of a product."""

    rows: ir.Value  # [n, C, K], as given, or rounded, or filled up to whole blocks
    weight: ir.Value  # [n, N, K]


def unpack(
    write: Writer, rows: ir.Value, codes: ir.Value, scales: ir.Value, weight_format: str, group_size: int
) -> Unpacked:
    """Factors of the products of n experts with their tokens.

    Args:
        write: writes the nodes.
        rows: float32 [n, C, K].
        codes, scales: the experts' weights as they are stored.
        weight_format, group_size: of the weights.
    """
    wide = write("Cast", scales, to=ir.DataType.FLOAT)
    if weight_format == "fp8":
        return Unpacked(rows, write("Mul", write("Cast", codes, to=ir.DataType.FLOAT), _column(write, wide)))
    if weight_format == "w4a8":
        rows = _round_rows(write, rows)
    return _int4(write, rows, codes, wide, group_size)


def _column(write: Writer, scales: ir.Value) -> ir.Value:
    return write("Unsqueeze", scales, write.ints(2))


def _int4(write: Writer, rows: ir.Value, codes: ir.Value, scales: ir.Value, group_size: int) -> Unpacked:
    """Bytes [n, blocks, N, 32] and scales [n, groups, N]."""
    assert codes.shape is not None
    count, blocks, outputs, _ = (int(axis) for axis in codes.shape if isinstance(axis, int))
    by_row = write("Transpose", codes, perm=[0, 2, 1, 3])  # [n, N, blocks, 32]
    # Byte j of a block holds places j and j + 32. In sixteenths, the high nibble is the whole part.
    sixteenths = write("DequantizeLinear", by_row, write.number(1 / 16))
    high = write("Floor", sixteenths)
    low = write("Mul", write("Sub", sixteenths, high), write.number(16.0))
    nibbles = write("Concat", low, high, axis=3)  # [n, N, blocks, 64], 0 to 15
    # A nibble c is a sign of weight 8 and a magnitude: c, or 8 - c from 8 on. Half of it, negated: -(c - 4) / 2 - 2, or
    # (c - 4) / 2 - 2 from 8 on. Where, which would say so, takes ten times as long as this.
    sign = write("Sub", write("Clip", nibbles, write.number(7.0), write.number(8.0)), write.number(7.5))
    turned = write("Mul", sign, write("Sub", nibbles, write.number(4.0)))
    values = write("Sub", turned, write.number(2.0))
    places = blocks * INT4_BLOCK
    grouped = write("Reshape", values, write.ints(count, outputs, places // group_size, group_size))
    # The last block may lack its second group; its weights are zero.
    groups = write("Shape", scales, start=1, end=2)
    missing = write("Sub", write.ints(places // group_size), groups)
    padding = write("Concat", write.ints(0, 0, 0, 0, 0), missing, axis=0)
    doubled = write("Mul", write("Transpose", scales, perm=[0, 2, 1]), write.number(-2.0))
    scale_of = write("Pad", doubled, padding)  # [n, N, groups]
    scaled = write("Mul", grouped, write("Unsqueeze", scale_of, write.ints(3)))
    weight = write("Reshape", scaled, write.ints(count, outputs, places))
    lacking = write("Sub", write.ints(places), write("Shape", rows, start=2, end=3))
    filled = write("Pad", rows, write("Concat", write.ints(0, 0, 0, 0, 0), lacking, axis=0))
    return Unpacked(filled, weight)


def _round_rows(write: Writer, rows: ir.Value) -> ir.Value:
    """What is left of activations [n, C, K] in E4M3 with one scale per row; a row of zeros has scale 1."""
    limit = write.number(FP8_MAX)
    largest = write("ReduceMax", write("Abs", rows), write.ints(-1), keepdims=1)
    wanted = write("Div", largest, limit)
    scale = write("Where", write("Greater", wanted, write.number(0.0)), wanted, write.number(1.0))
    inside = write("Clip", write("Div", rows, scale), write.number(-FP8_MAX), limit)
    codes = write("Cast", inside, to=ir.DataType.FLOAT8E4M3FN)
    return write("Mul", write("Cast", codes, to=ir.DataType.FLOAT), scale)
