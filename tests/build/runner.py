"""Builds a bundle in a process of its own that may end at a chosen point; started by the tests beside it.

Usage: python -m tests.build.runner CHECKPOINT OUTPUT [--target NAME] [--max-context N]
    [--at LABEL COUNT ACTION] [--file-size-limit BYTES]

COUNT is a number of advances of the task LABEL (0 is its start), or "end". LABEL "rename" means: just before a file of
that name (COUNT) gets it. ACTION is "kill" (SIGKILL to itself) or "pause" (say so on stdout, go on at end of stdin).
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dgcompile.build import build
from dgcompile.errors import DgcompileError
from dgcompile.progress import Advance, Progress
from dgcompile.recipe import Recipe
from dgcompile.target import Target


def act(action: str) -> None:
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    print("paused", flush=True)
    sys.stdin.read()


class Ending(Progress):
    """Acts when a task gets to a point."""

    def __init__(self, label: str, count: str, action: str) -> None:
        self.label, self.count, self.action = label, count, action

    @contextmanager
    def task(self, label: str, total: float | None = None, unit: str = "") -> Iterator[Advance]:
        advances = 0

        def reached(point: str) -> None:
            if (label, point) == (self.label, self.count):
                act(self.action)

        def advance(amount: float = 1.0, /) -> None:
            nonlocal advances
            advances += 1
            reached(str(advances))

        reached("0")
        yield advance
        reached("end")


def act_before_rename(name: str, action: str) -> None:
    replace = Path.replace

    def watched(self: Path, target: Any) -> Path:
        if Path(target).name == name:
            act(action)
        return replace(self, target)

    Path.replace = watched  # type: ignore[method-assign, assignment]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint")
    parser.add_argument("output")
    parser.add_argument("--target", default="cpu")
    parser.add_argument("--max-context", type=int)
    parser.add_argument("--at", nargs=3, default=["", "", ""])
    parser.add_argument("--file-size-limit", type=int)
    options = parser.parse_args()
    label, count, action = options.at
    if label == "rename":
        act_before_rename(count, action)
    if options.file_size_limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (options.file_size_limit, resource.RLIM_INFINITY))
    try:
        target = Target.load(options.target)
        build(
            options.checkpoint,
            target,
            Recipe.load("fp32" if target.backend == "onnxruntime" else "bf16"),
            options.output,
            max_context=options.max_context,
            progress=Ending(label, count, action),
        )
    except DgcompileError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
