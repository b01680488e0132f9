"""The process of a bundle: ``python -m dgcompile.bench.bundle_worker``. It has no torch.

Commands: ``open`` (once, first), ``generate``, ``memory``; see the functions.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from dgcompile.bench.command_loop import serve


def main() -> None:
    """Entry point of the process."""
    contender = _Contender()
    serve({"open": contender.open, "generate": contender.generate, "memory": contender.memory})


class _Contender:
    """The opened bundle."""

    _pipeline: Any
    _session: Any
    _stamps: Any

    def open(self, command: Mapping[str, Any]) -> Mapping[str, Any]:
        """Imports what the bundle needs, opens it and takes one denoising step: ``path``, ``backend``, ``threads``,
        ``prompt``, ``config``, ``seed``."""
        started = time.perf_counter()
        pipeline_module = import_module("dgcompile.runtime.pipeline")
        backend = "onnxruntime" if command["backend"] == "onnxruntime" else "tensorrt"
        import_module(f"dgcompile.runtime.{backend}_session")
        imported = time.perf_counter()
        self._pipeline = pipeline_module.Pipeline.open(command["path"], command["threads"])
        opened = time.perf_counter()

        from dgcompile.bench.stamps import Stamps

        self._stamps = Stamps()
        self._session = _Stamped(self._pipeline.session, self._stamps)
        ready = time.perf_counter()
        self._generate(command)
        return {
            "import_seconds": imported - started,
            "open_seconds": opened - imported,
            "first_step_seconds": time.perf_counter() - ready,
        }

    def generate(self, command: Mapping[str, Any]) -> Mapping[str, Any]:
        """Generates with stamps: ``prompt``, ``config``, ``seed``."""
        run: Mapping[str, Any] = self._generate(command).model_dump()
        return run

    def memory(self, command: Mapping[str, Any]) -> Mapping[str, Any]:
        """The memory of a ``generate``."""
        from dgcompile.bench.machine import watch_memory

        memory = watch_memory(lambda: self._generate(command))
        return {**memory.model_dump(), "has_torch": "torch" in sys.modules}

    def _generate(self, command: Mapping[str, Any]) -> Any:
        from dgcompile.generation_config import GenerationConfig
        from dgcompile.runtime.loop import generate

        config = GenerationConfig.model_validate(command["config"])
        self._stamps.start()
        result = generate(self._session, [command["prompt"]], config, [command["seed"]])[0]
        return self._stamps.finish(len(result.token_ids))


class _Stamped:
    """A session that notes when it is called."""

    def __init__(self, session: Any, stamps: Any) -> None:
        self._session = session
        self._stamps = stamps

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def encode(self, *args: Any, **options: Any) -> None:
        with self._stamps.encoding():
            self._session.encode(*args, **options)

    def denoise(self, *args: Any, **options: Any) -> None:
        self._stamps.denoising()
        self._session.denoise(*args, **options)


if __name__ == "__main__":
    main()
