"""TextStream: an answer's text, canvas by canvas, so that what was given out is never taken back."""

from __future__ import annotations

from collections.abc import Sequence

from dgcompile.runtime.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"  # what a tokenizer writes for bytes that are no character, or not yet one


class TextStream:
    """Turns token ids into text as they come.

    Text is held back where it may still change: the last bytes of half a character, and what may be the beginning of a
    stop string.

    Args:
        tokenizer: the bundle's.
        stop: the text ends before the first of these.

    Attributes:
        text: what was given out so far.
        stopped: whether a stop string came. What follows it is dropped.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self.text = ""
        self.stopped = False
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        # Tokens are decoded behind some that end with a whole character: the first token of a text is written without
        # its leading space, and what bytes mean depends on their neighbours inside a character.
        self._context: list[int] = []
        self._context_length = 0  # characters
        self._pending: list[int] = []
        self._decoded = 0  # characters of the pending tokens' text that are held or given out
        self._held = ""

    def add(self, token_ids: Sequence[int], *, last: bool = False) -> str:
        """Adds the tokens of a canvas.

        Args:
            token_ids: the tokens.
            last: nothing comes after them, so nothing is held back.

        Returns:
            The text that is final now and was not given out before.
        """
        if self.stopped:
            return ""
        self._held += self._decode(token_ids, last)
        end = self._find_stop()
        if end is not None:
            self.stopped = True
            last = True
            self._held = self._held[:end]
        kept = 0 if last else self._stop_prefix()
        new, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        self.text += new
        return new

    def _decode(self, token_ids: Sequence[int], last: bool) -> str:
        """Text of new tokens, without the half character at its end."""
        self._pending += token_ids
        text = self._tokenizer.decode(self._context + self._pending)[self._context_length :]
        whole = text if last else text.rstrip(_REPLACEMENT)
        new = whole[self._decoded :]
        self._decoded = max(self._decoded, len(whole))
        if whole and len(whole) == len(text):
            self._context, self._pending, self._decoded = self._pending, [], 0
            self._context_length = len(self._tokenizer.decode(self._context))
        return new

    def _find_stop(self) -> int | None:
        found = [place for stop in self._stop if (place := self._held.find(stop)) >= 0]
        return min(found, default=None)

    def _stop_prefix(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            end = self._held[-length:]
            if any(stop.startswith(end) for stop in self._stop):
                return length
        return 0
