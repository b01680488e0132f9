"""Which source code did something: so that what edited code would do otherwise is done again."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
from pathlib import Path

from dgcompile.errors import StageError


@functools.cache
def source_hash(module: str) -> str:
    """SHA-256 over the Python source of a module or a whole package, so that edited code makes its stage run again.

    Taken once per process: what is edited later is not what runs.
    """
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise StageError(f"the source of {module} cannot be found", fix="install dgcompile again")
    origin = Path(spec.origin)
    folder = origin.parent
    files = sorted(folder.rglob("*.py")) if spec.submodule_search_locations is not None else [origin]
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.relative_to(folder).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()
