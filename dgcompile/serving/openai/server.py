"""Running the OpenAI-compatible server: its socket, its thread, and its end."""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from types import TracebackType

import uvicorn

from dgcompile.errors import EngineError, InputError
from dgcompile.serving.openai.app import create_app
from dgcompile.serving.openai.front import Front

GRACE_SECONDS = 20.0
"""Seconds that running answers get to end when the server is stopped; Kubernetes kills after 30 by default."""

LAST_SECONDS = 5.0
"""Seconds that the connections of answers which were broken off get to tell it."""

BACKLOG = 2048
"""Connections that the kernel holds until they are accepted; uvicorn's default."""

MAX_HEADER_BYTES = 64 << 10
"""Of a request's line and headers together."""


def bind(host: str, port: int) -> socket.socket:
    """Takes an address, so that one that is in use is found before a model is loaded.

    Args:
        host: an address of this machine or a name for one.
        port: 0 takes a free one.

    Raises:
        InputError: the address cannot be used.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InputError(
            f"cannot listen on {host}, port {port}: {reason}", fix="give another --host or --port"
        ) from error
    return listener


def url(listener: socket.socket) -> str:
    """Where a listening socket is reached."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_local(listener: socket.socket) -> bool:
    """Whether only programs on this machine reach a listening socket."""
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback


class Server:
    """The HTTP server in a thread of its own, from the ``with`` statement's begin to its end.

    It answers from the start: with 503 until ``front.service`` is there. At the end running answers may finish for
    ``grace`` seconds, then they get an error. The front's service is closed.

    Args:
        front: what it serves.
        listener: the socket that it listens on; it closes it.
        grace: seconds.
    """

    def __init__(self, front: Front, listener: socket.socket, *, grace: float = GRACE_SECONDS) -> None:
        self._front = front
        self._listener = listener
        self._grace = grace
        config = uvicorn.Config(
            create_app(front),
            http="h11",
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            timeout_graceful_shutdown=int(grace + LAST_SECONDS),
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="dgcompile-http", daemon=True)
        # Not Thread.join: a thread whose join was interrupted counts as ended in CPython (gh-90882).
        self._ended = threading.Event()

    def __enter__(self) -> Server:
        self._thread.start()
        while not self._server.started:
            self._check_alive()
            time.sleep(0.01)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._front.closing = True
        self._server.should_exit = True
        try:
            self._ended.wait(self._grace)
        finally:
            # Also when a second Ctrl-C ends the waiting: whatever still runs is told so.
            if self._front.service is not None:
                self._front.service.close()
            self._ended.wait(LAST_SECONDS)

    def wait(self) -> None:
        """Waits until a signal handler raises.

        Raises:
            EngineError: the HTTP server ended by itself.
        """
        self._ended.wait()
        self._check_alive()

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self._listener])
        finally:
            self._ended.set()

    def _check_alive(self) -> None:
        if self._ended.is_set():
            raise EngineError("the HTTP server ended; its log says why")
