"""Work in a process of its own: one JSON line in, JSON lines out, until the last event or the end of either side."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_LAST_LINES = 12
_LINE_LENGTH = 400


class Ended(NamedTuple):
    """How a worker ended.

    Attributes:
        last: its last event; empty if there was none.
        code: exit code of the process; negative for a signal.
        words: how the process ended and the last lines that it wrote to stderr.
    """

    last: Mapping[str, Any]
    code: int
    words: str

    @property
    def done(self) -> bool:
        """Whether it did its work."""
        return self.last.get("event") == "done" and self.code == 0


def run_worker(
    command: Sequence[str],
    job: Mapping[str, Any],
    told: Callable[[Mapping[str, Any]], None],
    *,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Ended:
    """Starts a worker, gives it its job and follows its events. Whatever ends this call ends the worker.

    Args:
        command: what to start.
        job: goes to its stdin as one line; stdin stays open as long as this process lives.
        told: called with each event.
        folder: its working folder; this process's where None.
        environment: its variables; this process's where None.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        cwd=folder,
        env=environment,
        # Ctrl-C is this process's to handle: it ends the worker below.
        start_new_session=True,
    )
    assert process.stdin and process.stdout and process.stderr
    said: deque[str] = deque(maxlen=_LAST_LINES)
    listener = threading.Thread(target=_listen, args=(process.stderr, said), daemon=True)
    listener.start()
    last: dict[str, Any] = {}
    try:
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
        for line in process.stdout:
            last = json.loads(line)
            told(last)
        code = process.wait()
    except BrokenPipeError:
        code = process.wait()
    finally:
        process.kill()
        process.wait()
        listener.join(timeout=5)
    ended = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return Ended(last, code, f"{ended}; its last words: {'; '.join(said) or 'it said nothing'}")


def _listen(stream: Any, said: deque[str]) -> None:
    for line in stream:
        if line.strip():
            said.append(" ".join(line.split())[:_LINE_LENGTH])
