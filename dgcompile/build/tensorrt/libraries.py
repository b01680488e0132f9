"""Which engine library is installed, and the environment that its builder needs. The library itself is never imported
here: only the worker's process does that.
"""

from __future__ import annotations

import importlib.util
import os
from importlib import metadata
from pathlib import Path

from dgcompile.errors import StageError
from dgcompile.gpu import LIBRARY_EXTRAS

_DISTRIBUTIONS = {
    "tensorrt_rtx": ("tensorrt_rtx", "tensorrt_rtx_cu13_bindings"),
    "tensorrt": ("tensorrt", "tensorrt_cu13", "tensorrt_cu13_bindings", "tensorrt_cu12"),
}
_KEPT_VARIABLES = ("CUDA", "NVIDIA", "PYTHON", "TMPDIR", "VIRTUAL_ENV")
_MALLOC = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0:glibc.malloc.arena_max=65536"}
"""Keeps memory of the library's short-lived threads out of the building thread's hands. glibc gives a freed piece to
the thread that freed it, whoever took it, unless that cache is off; and with as many arenas as threads (the library
starts one for each processor) none takes from the building thread's. Otherwise, addresses follow how threads are
scheduled: see worker.py."""
_LINKS = "lib"
_LIBRARY_FOLDERS = {"tensorrt_rtx": "tensorrt_rtx_libs", "tensorrt": "tensorrt_libs"}


def library_version(backend: str) -> str | None:
    """Version of the installed engine library, "tensorrt" or "tensorrt_rtx"; None where it is not installed."""
    if importlib.util.find_spec(backend) is None:
        return None
    for distribution in _DISTRIBUTIONS[backend]:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    raise StageError(
        f"{backend} can be imported but no package says its version",
        expected=f"one of the packages {', '.join(_DISTRIBUTIONS[backend])}",
        fix=f"pip install 'dgcompile[{LIBRARY_EXTRAS[backend]}]'",
    )


def worker_environment(backend: str, folder: Path) -> dict[str, str]:
    """Environment variables of a builder's process.

    When a graph has plugins, the parser loads the library once more by its name without a version
    (``libtensorrt_rtx.so``) and ends the process if there is none; the wheels have only ``libtensorrt_rtx.so.1``. Links
    of those names on LD_LIBRARY_PATH, which the loader reads when a process starts, help.

    Args:
        backend: the engine library.
        folder: the process's working folder, in which the links are made.
    """
    links = folder / _LINKS
    links.mkdir()
    spec = importlib.util.find_spec(_LIBRARY_FOLDERS[backend])
    for libraries in (spec.submodule_search_locations or ()) if spec else ():
        for library in sorted(Path(libraries).glob("lib*.so.*")):
            link = links / (library.name.partition(".so.")[0] + ".so")
            if not link.exists():
                link.symlink_to(library)
    # Memory addresses, and with them the bytes of an engine, follow the hash seed, the variables that are set and the
    # names of files: all are the same in every build (see worker.py).
    paths = [_LINKS, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    kept = {name: value for name, value in os.environ.items() if name.startswith(_KEPT_VARIABLES)}
    # numpy's linear algebra would start threads, which take memory when they happen to run.
    single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {**kept, **single, **_MALLOC, "LD_LIBRARY_PATH": ":".join(paths), "PYTHONHASHSEED": "0"}
