"""Answer: hands what the engine thread says about one request over to the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from starlette.types import Receive

from dgcompile.errors import DgcompileError
from dgcompile.serving.service import Completion, Delta


class Cancelled(Exception):
    """The answer was given up, because the client went away."""


class Answer:
    """The listener of one request.

    The service's methods (``is_cancelled``, ``on_...``) are called on its engine thread, the others on the loop's.

    Args:
        loop: the event loop whose tasks wait for the answer.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._events: asyncio.Queue[Delta | Completion | Exception] = asyncio.Queue()
        self._cancelled = False

    def is_cancelled(self) -> bool:
        """See :class:`~dgcompile.serving.service.Listener`."""
        return self._cancelled

    def on_delta(self, delta: Delta) -> None:
        """See :class:`~dgcompile.serving.service.Listener`."""
        self._hand_over(delta)

    def on_finish(self, completion: Completion) -> None:
        """See :class:`~dgcompile.serving.service.Listener`."""
        self._hand_over(completion)

    def on_cancelled(self) -> None:
        """See :class:`~dgcompile.serving.service.Listener`."""
        self._hand_over(Cancelled())

    def on_error(self, error: DgcompileError) -> None:
        """See :class:`~dgcompile.serving.service.Listener`."""
        self._hand_over(error)

    def cancel(self) -> None:
        """Nobody wants the answer any more. Without effect on a finished one."""
        self._cancelled = True

    async def events(self) -> AsyncIterator[Delta | Completion]:
        """The deltas as they come, then the completion.

        Raises:
            Cancelled: :meth:`cancel` was called.
            DgcompileError: the engine failed, or the service was closed.
        """
        while True:
            event = await self._events.get()
            if isinstance(event, Exception):
                raise event
            yield event
            if isinstance(event, Completion):
                return

    async def completion(self) -> Completion:
        """The whole answer; raises as :meth:`events`."""
        async for event in self.events():
            if isinstance(event, Completion):
                return event
        raise AssertionError("events end with a completion or an exception")

    def _hand_over(self, event: Delta | Completion | Exception) -> None:
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:
            # The loop is closed: the HTTP server has ended, and nobody waits.
            self._cancelled = True


async def cancel_on_disconnect(receive: Receive, answer: Answer) -> None:
    """Waits until the client goes away, and gives its answer up. The body must have been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass
    answer.cancel()
