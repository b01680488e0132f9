"""Running a bundle must not need what only building one needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
from dgcompile.runtime.pipeline import Pipeline

pipeline = Pipeline.open(sys.argv[1], threads=1)
prompt = pipeline.encode([{"role": "user", "content": "Hello"}])
(result,) = pipeline.generate([prompt])
pipeline.decode(result.token_ids)
heavy = {"torch", "transformers", "onnx", "onnxscript", "huggingface_hub", "sympy", "safetensors"} & sys.modules.keys()
print(len(result.token_ids), sorted(heavy))
"""

GPU_SCRIPT = """
import sys
import dgcompile.runtime.tensorrt_session
import dgcompile.plugins.adapter
import dgcompile.plugins.kernel_library

# Nothing of CUDA either: the machine is checked before it is touched.
heavy = {"torch", "transformers", "onnx", "onnxruntime", "triton", "cuda", "tensorrt", "tensorrt_rtx", "polygraphy"}
print(sorted(heavy & sys.modules.keys()))
"""


def test_a_generation_imports_no_builder(bundle: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(bundle)], capture_output=True, text=True, timeout=120, check=True
    )
    tokens, heavy = done.stdout.split(maxsplit=1)
    assert int(tokens) > 0
    assert heavy.strip() == "[]"


def test_running_on_a_gpu_imports_no_builder() -> None:
    done = subprocess.run([sys.executable, "-c", GPU_SCRIPT], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
