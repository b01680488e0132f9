"""The process of a checkpoint in transformers: ``python -m dgcompile.bench.transformers_worker``.

Commands: ``open`` (once, first), ``probe``, ``generate``, ``memory``; see
:class:`dgcompile.bench.transformers_side.TransformersSide`, which is imported by the first one to time that.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from dgcompile.bench.command_loop import serve


def main() -> None:
    """Entry point of the process."""
    handlers: dict[str, Any] = {}

    def open_checkpoint(command: Mapping[str, Any]) -> Mapping[str, Any]:
        started = time.perf_counter()
        side = import_module("dgcompile.bench.transformers_side").TransformersSide()
        imported = time.perf_counter()
        handlers.update(probe=side.probe, generate=side.generate, memory=side.memory)
        return {**side.open(command), "import_seconds": imported - started}

    handlers["open"] = open_checkpoint
    serve(handlers)


if __name__ == "__main__":
    main()
