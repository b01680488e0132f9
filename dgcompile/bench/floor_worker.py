"""The process that measures the floor: ``python -m dgcompile.bench.floor_worker``. Command: ``measure``.

A process of its own, so that neither the libraries' threads nor the arrays are there while contenders run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime

from dgcompile.bench.command_loop import serve

COPY_BYTES = 256 << 20
"""Far beyond any cache of a core or a socket that these models run on."""

SECONDS = 0.4
"""That each thing is repeated for, at least three times."""

Floats = npt.NDArray[np.float32]


def main() -> None:
    """Entry point of the process."""
    serve({"measure": _measure})


def _measure(command: Mapping[str, Any]) -> Mapping[str, Any]:
    """``threads``; ``shapes``: [m, k, n] each."""
    threads: int = command["threads"]
    products = []
    for m, k, n in command["shapes"]:
        random = np.random.default_rng(0)
        one, other = random.random((m, k), dtype=np.float32), random.random((k, n), dtype=np.float32)
        for library, multiply in _multipliers(one, other, threads).items():
            rate = 2 * m * k * n / _fastest(multiply)
            products.append({"m": m, "k": k, "n": n, "library": library, "flops_per_second": rate})
    return {"copy_bytes_per_second": _copy_rate(threads), "products": products}


def _copy_rate(threads: int) -> float:
    """Bytes read and written per second, by ``threads`` threads that copy a part each."""
    source = np.ones(COPY_BYTES // 4, dtype=np.float32)
    target = np.zeros_like(source)
    parts = list(zip(np.array_split(target, threads), np.array_split(source, threads), strict=True))
    with ThreadPoolExecutor(threads) as pool:
        # numpy lets other threads run while it copies.
        taken = _fastest(lambda: list(pool.map(lambda part: np.copyto(*part), parts)))
    return 2 * source.nbytes / taken


def _multipliers(one: Floats, other: Floats, threads: int) -> dict[str, Callable[[], Any]]:
    """The product by each library. onnxruntime needs the package onnx to be given a graph."""
    result = np.empty((one.shape[0], other.shape[1]), dtype=np.float32)
    found: dict[str, Callable[[], Any]] = {"numpy": lambda: np.matmul(one, other, out=result)}
    if find_spec("onnx") is not None:
        session = _matmul_session(one, other, threads)
        found["onnxruntime"] = lambda: session.run(None, {"one": one})
    return found


def _matmul_session(one: Floats, other: Floats, threads: int) -> onnxruntime.InferenceSession:
    """A session whose only node multiplies by the constant ``other``, which onnxruntime lays out as it likes best."""
    onnx: Any = import_module("onnx")
    make: Any = onnx.helper
    graph = make.make_graph(
        [make.make_node("MatMul", ["one", "other"], ["result"])],
        "product",
        [make.make_tensor_value_info("one", onnx.TensorProto.FLOAT, list(one.shape))],
        [make.make_tensor_value_info("result", onnx.TensorProto.FLOAT, [one.shape[0], other.shape[1]])],
        [onnx.numpy_helper.from_array(other, "other")],
    )
    # Any old pair of versions does: the operator has not changed since.
    model = make.make_model(graph, opset_imports=[make.make_opsetid("", 17)], ir_version=8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _fastest(work: Callable[[], Any]) -> float:
    """Seconds of the fastest run, after one that warms up."""
    work()
    fastest, runs, end = float("inf"), 0, time.perf_counter() + SECONDS
    while runs < 3 or time.perf_counter() < end:
        started = time.perf_counter()
        work()
        fastest = min(fastest, time.perf_counter() - started)
        runs += 1
    return fastest


if __name__ == "__main__":
    main()
