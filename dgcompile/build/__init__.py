"""Building a bundle: stages that are recorded, resumable and repeatable.

torch, transformers and onnx are imported by the stages that need them, when they run.
"""

from __future__ import annotations

from dgcompile.build.limits import DEFAULT_MAX_CONTEXT, resolve_max_context
from dgcompile.build.pipeline import build, check_buildable, resume

__all__ = ["DEFAULT_MAX_CONTEXT", "build", "check_buildable", "resolve_max_context", "resume"]
