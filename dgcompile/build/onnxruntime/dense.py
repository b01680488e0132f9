"""Dense weights that are stored in other types than they are computed with: converted as little as possible.

In products with weights in INT8 or E4M3 the scale moves behind the product.

In the traced graph the weight [N, K] is multiplied by its scales and transposed before the product. Here the codes are
cast alone, the product takes them transposed as they lie, and the scales, one per output channel, multiply its result:
[tokens, N] numbers instead of [N, K]. It also keeps ONNX Runtime from looking for quantized products, which would
round weights back to INT8 beside the transposition.
"""

from __future__ import annotations

import onnx_ir as ir

from dgcompile.build.onnxruntime.matching import made_by
from dgcompile.build.onnxruntime.writer import Writer, take_over

_CODES = frozenset({ir.DataType.INT8, ir.DataType.FLOAT8E4M3FN})


def scale_after_products(graph: ir.Graph) -> int:
    """Replaces ``MatMul(x, Transpose(DequantizeLinear(codes, scales)))``; returns how many there were."""
    found = 0
    for node in list(graph):
        transposed = made_by(node.inputs[1], "Transpose") if node.op_type == "MatMul" else None
        numbers = None if transposed is None else made_by(transposed.inputs[0], "DequantizeLinear")
        if numbers is None or numbers.attributes.get_int("block_size"):
            continue
        codes, scales = numbers.inputs[:2]
        if codes is None or codes.dtype not in _CODES or codes.const_value is None:
            continue
        write = Writer(graph, node.name or f"product_{found}")
        product = write("FusedMatMul", node.inputs[0], write("Cast", codes, to=ir.DataType.FLOAT), transB=1)
        scaled = write("Mul", product, scales)
        write.put_before(node)
        take_over(node.outputs[0], scaled)
        found += 1
    return found


def cast_after_gather(graph: ir.Graph) -> int:
    """Replaces ``Gather(Cast(table), ids)``, which casts all of the table; returns how many there were."""
    found = 0
    for node in list(graph):
        cast = made_by(node.inputs[0], "Cast") if node.op_type == "Gather" else None
        if cast is None or cast.inputs[0] is None or cast.inputs[0].const_value is None:
            continue
        write = Writer(graph, node.name or f"gather_{found}")
        rows = write("Gather", cast.inputs[0], node.inputs[1], axis=node.attributes.get_int("axis", 0))
        numbers = write("Cast", rows, to=cast.attributes.get_int("to", ir.DataType.FLOAT))
        write.put_before(node)
        take_over(node.outputs[0], numbers)
        found += 1
    return found
