"""Text to token ids and back, by the ``tokenizers`` library and the bundle's ``tokenizer.json``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tokenizers

from dgcompile.errors import BundleError, RequestError


class Tokenizer:
    """A loaded ``tokenizer.json``.

    Args:
        path: the file.

    Raises:
        BundleError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exceptions
            raise BundleError(f"{path} cannot be read: {error}", fix="build the bundle again") from error
        # A file may ask for padding or truncation, which a prompt must never suffer silently.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``.

        Args:
            text: special tokens that are spelled out in it are recognised.
            add_special_tokens: whether to add those that the file's post-processor adds (such as <bos>).

        Raises:
            RequestError: the text holds lone surrogates (what Python makes of bytes that are no UTF-8).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text cannot be written as UTF-8: character {error.start} is {text[error.start]!r}",
                expected="valid Unicode",
            ) from error
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ``token_ids``; ids that the file does not know give nothing."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    @property
    def longest_token(self) -> int:
        """Characters of the longest token: a text that has more than n times as many has more than n tokens."""
        return max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)))

    def token(self, token_id: int | None) -> str | None:
        """Spelling of one token, if there is such a token."""
        return None if token_id is None else self._tokenizer.id_to_token(token_id)
