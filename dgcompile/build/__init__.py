"""Building a bundle: stages that are recorded, resumable and repeatable.

torch, transformers and onnx are imported by the stages that need them, when they run.
"""

from __future__ import annotations

from dgcompile.build.pipeline import DEFAULT_MAX_CONTEXT, build, check_buildable, resolve_max_context, resume

__all__ = ["DEFAULT_MAX_CONTEXT", "build", "check_buildable", "resolve_max_context", "resume"]
