"""A process that compiles kernels: ``python -m dgcompile.plugins.compile_worker SM``, started by build_kernels.py.

Launches come as JSON lines on stdin, one at a time; for each, one JSON line goes out on stdout. When stdin closes the
process ends, so that none outlives a build that was killed.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from dataclasses import asdict
from typing import Any

from dgcompile.plugins.launch import Launch


def main() -> None:
    """Entry point of the process."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a compiler prints is no answer
    sm = int(sys.argv[1])
    for line in sys.stdin:
        answers.write(json.dumps(_compile(json.loads(line), sm)) + "\n")


def _compile(given: dict[str, Any], sm: int) -> dict[str, Any]:
    # Here, where a missing compiler becomes an answer.
    from dgcompile.plugins.compile import compile_launch

    try:
        compiled = compile_launch(_launch(given), sm)
    except Exception as problem:
        return {"problem": f"{type(problem).__name__}: {problem}"}
    return {**asdict(compiled), "cubin": base64.b64encode(compiled.cubin).decode(), "ptx": ""}


def _launch(given: dict[str, Any]) -> Launch:
    return Launch(
        **{
            **given,
            "arguments": tuple(given["arguments"]),
            "types": tuple(given["types"]),
            "grid": tuple(given["grid"]),
        }
    )


if __name__ == "__main__":
    main()
