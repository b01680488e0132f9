"""Ctrl-C that does not get lost.

A KeyboardInterrupt may surface as another exception (a C extension that was just being imported raises ImportError), or
be dropped (Python ignores exceptions in ``__del__``). So it is noted as well, and looked up where work goes on.
"""

from __future__ import annotations

import signal
from types import FrameType

_received = False


def install() -> None:
    """Notes Ctrl-C from now on, unless the process was started so that it ignores it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _receive)


def received() -> bool:
    """Whether Ctrl-C was pressed."""
    return _received


def check() -> None:
    """Raises KeyboardInterrupt if Ctrl-C was pressed."""
    if _received:
        raise KeyboardInterrupt


def _receive(number: int, frame: FrameType | None) -> None:
    global _received
    _received = True
    raise KeyboardInterrupt
