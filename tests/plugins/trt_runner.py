"""Builds one-node networks with the plugins, in a process of its own, and prints as JSON what came of it.

The parser loads the engine library under a name without version, which pip does not install: the caller makes a folder
with such a link and puts it on LD_LIBRARY_PATH (see :func:`environment`), which is read when a process starts.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

TYPES = {"bf16": 16, "fp16": 10, "fp32": 1, "i32": 6, "i64": 7, "i8": 3, "fp8": 17}  # of ONNX


def environment(folder: Path) -> dict[str, str]:
    """Environment of the process; ``folder`` gets the link."""
    spec = find_spec("tensorrt_rtx_libs")
    assert spec is not None and spec.submodule_search_locations is not None
    libraries = Path(spec.submodule_search_locations[0])
    link = folder / "libtensorrt_rtx.so"
    if not link.exists():
        link.symlink_to(next(libraries.glob("libtensorrt_rtx.so.*")))
    path = os.pathsep.join([str(folder), str(libraries), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])
    return {**os.environ, "LD_LIBRARY_PATH": path}


def run(folder: Path, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs jobs, see :func:`build`, in one new process."""
    command = [sys.executable, "-m", "tests.plugins.trt_runner"]
    done = subprocess.run(
        command,
        input=json.dumps(jobs),
        env=environment(folder),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    results: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return results


def model(job: dict[str, Any]) -> bytes:
    """The network: one node whose inputs are the network's. Axes of 0 are dynamic."""
    import onnx
    from onnx import helper

    def value(name: str, kind: str, shape: list[Any]) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, TYPES[kind], [size or f"{name}_{i}" for i, size in enumerate(shape)])

    inputs = [value(name, kind, shape) for name, kind, shape, _ in job["inputs"]]
    first = job["inputs"][0]
    node = helper.make_node(job["node"], [entry[0] for entry in job["inputs"]], ["output"], domain="dgcompile")
    node.attribute.extend(helper.make_attribute(name, attribute) for name, attribute in job["attributes"].items())
    graph = helper.make_graph([node], "one_node", inputs, [value("output", first[1], first[2])])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("dgcompile", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()


def build(job: dict[str, Any], keep: list[Any]) -> dict[str, Any]:
    """Builds one engine for SM 120.

    Args:
        job: library (folder of kernels), node, attributes, inputs as [name, type, shape with 0 for dynamic axes, those
            axes' [smallest, most common, largest] values], and optionally fault: name of a method of the operation that
            is made to raise.
        keep: objects that must outlive the call.
    """
    import tensorrt_rtx as trt

    from dgcompile.errors import DgcompileError
    from dgcompile.plugins.adapter import OPERATIONS, register_plugins
    from dgcompile.plugins.kernel_library import KernelLibrary

    problems: list[str] = []

    class Logger(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.ERROR:
                problems.append(message)

    logger = Logger()
    keep.append(logger)
    fault = job.get("fault")
    operation = next(operation for operation in OPERATIONS if job.get("operation", job["node"]) == operation.NAME)
    saved = getattr(operation, fault) if fault else None

    def broken(*_: Any) -> Any:
        raise ValueError("broken on purpose")

    try:
        builder = trt.Builder(logger)
        registration = register_plugins(trt, KernelLibrary.open(Path(job["library"]), job.get("sm", 120)), 170)
        network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        parser = trt.OnnxParser(network, logger)
        parsed = parser.parse(model(job))
        registration.check()
        if not parsed:
            return {"error": "; ".join(parser.get_error(i).desc() for i in range(parser.num_errors))}
        config = builder.create_builder_config()
        config.num_compute_capabilities = 1
        config.set_compute_capability(trt.ComputeCapability.SM120, 0)
        profile = builder.create_optimization_profile()
        for name, _, shape, ranges in job["inputs"]:
            if 0 in shape:
                values = [iter(column) for column in ranges]
                profile.set_shape(name, *[[size or next(column) for size in shape] for column in values])
        config.add_optimization_profile(profile)
        if fault:
            setattr(operation, fault, broken)
        engine = builder.build_serialized_network(network, config)
        produced = engine is not None
        registration.check()
        if not produced:
            return {"error": "; ".join(problems)}
        data = bytes(engine)
        return {
            "size": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
            "digest": registration.kernel_library.digest
            if registration.kernel_library.digest.encode() in data
            else None,
        }
    except DgcompileError as error:
        return {"error": str(error), "type": type(error).__name__, "problems": problems}
    finally:
        if fault:
            setattr(operation, fault, saved)


if __name__ == "__main__":
    keep: list[Any] = []
    print("\n" + json.dumps([build(job, keep) for job in json.load(sys.stdin)]))
    sys.stdout.flush()
    # The engine library and Python end in an order that has crashed.
    os._exit(0)
