"""A contender's process, as the one that measures sees it: commands go in, one JSON line each, and answers come back.

The long-lived sibling of :func:`dgcompile.worker_process.run_worker`. Whatever ends the ``with`` block, or this
process, ends the worker.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from dgcompile.errors import DgcompileError, EngineError, InputError, MissingDependencyError

_LAST_LINES = 6
_LINE_LENGTH = 400
_THREADS_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_ERRORS = {kind.__name__: kind for kind in (DgcompileError, EngineError, InputError, MissingDependencyError)}


class TooSlowError(EngineError):
    """A worker gave no answer in time."""


class Worker:
    """A process that does what it is told.

    Args:
        name: what messages call it.
        module: what runs in it; its ``main`` is :func:`dgcompile.bench.command_loop.serve`.
        threads: for the libraries that read their number of threads from the environment.
        environment: its other variables.

    Attributes:
        name: see above.
        started: when, by ``time.perf_counter``.
    """

    def __init__(self, name: str, module: str, threads: int, environment: Mapping[str, str]) -> None:
        self.name = name
        self.started = time.perf_counter()
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**environment, **dict.fromkeys(_THREADS_VARIABLES, str(threads))},
            # Ctrl-C is this process's to handle: it ends the worker.
            start_new_session=True,
        )
        self._said: deque[str] = deque(maxlen=_LAST_LINES)
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._listeners = [threading.Thread(target=target, daemon=True) for target in (self._listen, self._read)]
        for listener in self._listeners:
            listener.start()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        """Ends the process, and those that it started: torch's compiler has some."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for listener in self._listeners:
            listener.join(timeout=5)

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def ask(self, command: str, timeout: float | None = None, /, **values: Any) -> dict[str, Any]:
        """Gives a command and waits for its answer.

        Args:
            command: its name.
            timeout: seconds to wait at most; None waits for ever.
            **values: what goes with it.

        Raises:
            TooSlowError: there was no answer in time; the worker has been ended.
            EngineError: the worker died.
            DgcompileError: what the worker raised.
        """
        stdin = self._process.stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died: there will be no answer
            stdin.write(json.dumps({"do": command, **values}) + "\n")
            stdin.flush()
        try:
            answer = self._answers.get(timeout=timeout)
        except queue.Empty:
            self.end()
            raise TooSlowError(f"{self.name} took more than {timeout:g} s to {command}") from None
        if answer is None:
            self._answers.put(None)  # whoever asks again gets no answer either
            raise self._death()
        problem = answer.get("error")
        if problem is not None:
            kind = _ERRORS.get(problem["kind"], EngineError)
            raise kind(f"{self.name}: {problem['problem']}", expected=problem["expected"], fix=problem["fix"])
        return answer

    def _death(self) -> EngineError:
        code = self._process.wait()
        self.end()
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return EngineError(
            f"the process of {self.name} {how}; its last words: {'; '.join(self._said) or 'it said nothing'}",
            fix="the machine's memory may not suffice: measure fewer contenders at a time" if code == -9 else None,
        )

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(json.loads(line))
        self._answers.put(None)  # no more will come

    def _listen(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if line.strip():
                self._said.append(" ".join(line.split())[:_LINE_LENGTH])
