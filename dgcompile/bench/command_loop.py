"""A contender's process, as it sees itself: commands come in, answers go out, and it ends when nobody listens."""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from dgcompile.errors import DgcompileError

Handler = Callable[[Mapping[str, Any]], Mapping[str, Any]]


def serve(handlers: Mapping[str, Handler]) -> None:
    """Answers commands until stdin ends.

    Args:
        handlers: by the name of the command; each gets its values and gives the answer's.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print
    commands: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(commands,), daemon=True).start()
    while True:
        command = commands.get()
        try:
            answer = dict(handlers[command.pop("do")](command))
        except DgcompileError as error:
            kind = next((kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _KNOWN), "EngineError")
            answer = _problem(kind, error.problem, error.expected, error.fix)
        except Exception as error:
            traceback.print_exc()
            answer = _problem("EngineError", f"{type(error).__name__}: {error}", None, None)
        answers.write(json.dumps(answer) + "\n")


_KNOWN = ("InputError", "EngineError", "MissingDependencyError")


def _problem(kind: str, problem: str, expected: str | None, fix: str | None) -> dict[str, Any]:
    return {"error": {"kind": kind, "problem": problem, "expected": expected, "fix": fix}}


def _read(commands: queue.SimpleQueue[dict[str, Any]]) -> None:
    """Ends this process when stdin is closed, as it is when the parent dies, even in the middle of a command."""
    for line in sys.stdin:
        commands.put(json.loads(line))
    if os.getpgrp() == os.getpid():  # also the processes that this one started: torch's compiler has some
        os.killpg(0, signal.SIGKILL)
    os._exit(0)
