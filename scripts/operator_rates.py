"""What onnxruntime's CPU operators reach: products in float32 and with 4-bit weights, and what unpacks stored weights.

    python scripts/operator_rates.py

The figures are this machine's; the engines of the cpu target are written with them in mind.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

import click
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from rich.console import Console
from rich.table import Table

SHAPES = ((256, 512, 32768), (256, 32768, 512), (256, 512, 512), (32, 512, 256))
"""M, K, N of the products: logits, soft embeddings, a projection and an expert of the hidden-512 model."""

GROUP = 64
WEIGHTS = (4, 256, 512)
"""Of the weights that are unpacked: four experts."""


def seconds(
    nodes: list[onnx.NodeProto],
    constants: list[onnx.TensorProto],
    output: tuple[int, ...],
    threads: int,
    runs: int,
    x: np.ndarray | None = None,
    packing: bool = False,
) -> float:
    """Median time of a graph whose output is ``y``, float32."""
    inputs = [] if x is None else [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, output)]
    graph = helper.make_graph(nodes, "operators", inputs, outputs, constants)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.disable_prepacking", "0" if packing else "1")
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    binding, y = session.io_binding(), np.empty(output, np.float32)
    if x is not None:
        binding.bind_cpu_input("x", x)
    binding.bind_output("y", "cpu", 0, np.float32, output, y.ctypes.data)
    taken = []
    for _ in range(runs + 1):
        start = time.perf_counter()
        session.run_with_iobinding(binding)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def products(threads: int, runs: int) -> list[dict[str, Any]]:
    """GFLOP/s of each shape: float32, and weights in 4 bits, packed when the session is made or in each call."""
    rng = np.random.default_rng(0)
    found = []
    for m, k, n in SHAPES:
        x = rng.standard_normal((m, k), dtype=np.float32)
        flops = 2 * m * k * n / 1e9
        weight = numpy_helper.from_array(rng.standard_normal((n, k), dtype=np.float32), "w")
        codes = numpy_helper.from_array(rng.integers(256, size=(n, k // GROUP, GROUP // 2), dtype=np.uint8), "w")
        scales = numpy_helper.from_array(rng.random((n, k // GROUP), dtype=np.float32), "s")
        plain = helper.make_node("FusedMatMul", ["x", "w"], ["y"], domain="com.microsoft", transB=1)
        packed: dict[str, Any] = {"K": k, "N": n, "bits": 4, "block_size": GROUP}
        row: dict[str, Any] = {"m": m, "k": k, "n": n}
        row["float32"] = flops / seconds([plain], [weight], (m, n), threads, runs, x)
        for level in (0, 4):
            node = helper.make_node(
                "MatMulNBits", ["x", "w", "s"], ["y"], domain="com.microsoft", accuracy_level=level, **packed
            )
            for packing in (True, False):
                name = f"4 bits{', int8 products' if level else ''}{', packed' if packing else ''}"
                row[name] = flops / seconds([node], [codes, scales], (m, n), threads, runs, x, packing)
        found.append(row)
    return found


def unpacking(threads: int, runs: int) -> dict[str, float]:
    """Nanoseconds for each weight."""
    rng = np.random.default_rng(0)
    count = int(np.prod(WEIGHTS))
    numbers = numpy_helper.from_array(rng.standard_normal(WEIGHTS, dtype=np.float32), "w")
    codes = numpy_helper.from_array(rng.integers(-7, 8, size=WEIGHTS).astype(np.int8), "w")
    raw = rng.integers(256, size=count // 2, dtype=np.uint8).tobytes()
    nibbles = helper.make_tensor("w", TensorProto.INT4, WEIGHTS, raw, raw=True)
    one = numpy_helper.from_array(np.float32(1).reshape(()), "one")
    grouped = numpy_helper.from_array(rng.random((*WEIGHTS[:2], WEIGHTS[2] // GROUP), dtype=np.float32), "s")
    bytes_ = numpy_helper.from_array(rng.integers(256, size=WEIGHTS).astype(np.uint8), "w")
    four = numpy_helper.from_array(np.array(4, np.uint8), "four")
    to_float = {"to": TensorProto.FLOAT}
    cases: dict[str, tuple[list[onnx.NodeProto], list[onnx.TensorProto]]] = {
        "Cast of int8": ([helper.make_node("Cast", ["w"], ["y"], **to_float)], [codes]),
        "Mul of floats": ([helper.make_node("Mul", ["w", "one"], ["y"])], [numbers, one]),
        "Where (and Greater)": (
            [helper.make_node("Greater", ["w", "one"], ["g"]), helper.make_node("Where", ["g", "w", "one"], ["y"])],
            [numbers, one],
        ),
        "Cast of INT4": ([helper.make_node("Cast", ["w"], ["y"], **to_float)], [nibbles]),
        "blocked DequantizeLinear of INT4": (
            [helper.make_node("DequantizeLinear", ["w", "s"], ["y"], axis=2, block_size=GROUP)],
            [nibbles, grouped],
        ),
        "BitShift (and Cast)": (
            [
                helper.make_node("BitShift", ["w", "four"], ["b"], direction="RIGHT"),
                helper.make_node("Cast", ["b"], ["y"], **to_float),
            ],
            [bytes_, four],
        ),
    }
    return {name: seconds(*case, WEIGHTS, threads, runs) / count * 1e9 for name, case in cases.items()}


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.option("--threads", default=2, help="Threads of each call.")
@click.option("--runs", default=9, help="Timed calls of each.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(threads: int, runs: int, as_json: bool) -> None:
    """Rates of products, and times of what unpacks weights."""
    result = {"products": products(threads, runs), "unpacking_ns": unpacking(threads, runs), "threads": threads}
    if as_json:
        click.echo(json.dumps(result))
        return
    rates = Table(title=f"GFLOP/s, {threads} threads")
    for name in result["products"][0]:
        rates.add_column(name, justify="right")
    for row in result["products"]:
        rates.add_row(*(f"{value:.0f}" for value in row.values()))
    times = Table(title="nanoseconds for each weight")
    for name, value in result["unpacking_ns"].items():
        times.add_row(name, f"{value:.2f}")
    Console(width=120).print(rates, times)


if __name__ == "__main__":
    main()
