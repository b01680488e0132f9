"""The one exception tree of dgcompile.

Every error that a user can cause says what was wrong (file, option, tensor), what was expected and what to do next.
The command line prints the message alone (a traceback only with ``--debug``) and exits with ``exit_code``:
2 for bad input, 1 for a stage that failed on good input.
"""

from __future__ import annotations


class DgcompileError(Exception):
    """Base of all errors that dgcompile raises on purpose.

    Args:
        problem: what was wrong, naming the file, option or tensor and what was found there.
        expected: what would have been right; omitted when the problem says it already.
        fix: what the user can do next; omitted when it follows from ``expected``.
    """

    exit_code = 1

    def __init__(self, problem: str, *, expected: str | None = None, fix: str | None = None) -> None:
        self.problem = problem
        self.expected = expected
        self.fix = fix
        parts = [problem.rstrip(".")]
        if expected:
            parts.append(f"expected {expected.rstrip('.')}")
        if fix:
            parts.append(fix.rstrip("."))
        # What was found may hold lone surrogates, which no terminal and no reply could carry.
        super().__init__("; ".join(parts).encode(errors="backslashreplace").decode())


class InputError(DgcompileError):
    """The user's input is at fault: exit code 2."""

    exit_code = 2


class CheckpointError(InputError):
    """A checkpoint folder, its config or one of its tensors is unusable."""


class TargetError(InputError):
    """An unknown or malformed target."""


class RecipeError(InputError):
    """An unknown or malformed recipe, or one that the target cannot run."""


class BundleError(InputError):
    """A bundle is missing, damaged, foreign to this machine or already in use."""


class RequestError(InputError):
    """A generation request (prompt, limits, options) cannot be served as asked."""


class OverloadedError(DgcompileError):
    """A server's queue is full: the same request may be served a little later."""


class StageError(DgcompileError):
    """A build stage failed on input that was accepted."""


class TraceError(StageError):
    """The PyTorch graph could not be turned into ONNX."""


class CalibrationError(StageError):
    """The ranges of activations could not be taken."""


class EngineError(StageError):
    """A backend could not build, load or run an engine."""


class EngineElsewhereError(StageError):
    """All stages but the engine are done, and this machine cannot do that one. Exit code 3: go on on another.

    Args:
        lacking: what this machine lacks.
        machine: where it can be done.
        folder: the bundle.
    """

    exit_code = 3

    def __init__(self, lacking: str, machine: str, folder: str) -> None:
        super().__init__(
            f"{folder} is finished but for its engines, which this machine cannot build: {lacking}",
            fix=f"copy the folder to {machine} and run there: dgcompile build --resume {folder}",
        )


class MissingDependencyError(DgcompileError):
    """An optional package that this command needs is not installed."""
