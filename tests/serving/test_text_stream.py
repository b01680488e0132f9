"""Text canvas by canvas: joined, it is the text of all tokens; stop strings end it wherever they fall."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models

from dgcompile.runtime.tokenizer import Tokenizer
from dgcompile.serving.text_stream import TextStream
from tests.models import write_tokenizer

VOCAB = 288


@pytest.fixture(scope="module")
def bytewise(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Every byte is a token, besides special ones."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, VOCAB)
    return Tokenizer(folder / "tokenizer.json")


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Word pieces with bytes to fall back on, as Gemma's; the space before a text's first word is dropped."""
    vocabulary = [
        "<pad>",
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁the",
        "▁cat",
        "s",
        "▁",
        ".",
        "é",
        "▁東",
    ]
    raw = RawTokenizer(models.BPE({text: index for index, text in enumerate(vocabulary)}, [], byte_fallback=True))
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    raw.add_special_tokens(["<pad>"])
    file = tmp_path_factory.mktemp("pieces") / "tokenizer.json"
    raw.save(str(file))
    return Tokenizer(file)


TEXTS = st.text(st.sampled_from("ab \n.é東🦜"), max_size=40)


def cut(ids: list[int], places: list[int]) -> list[list[int]]:
    ends = sorted({min(place, len(ids)) for place in places} | {len(ids)})
    return [ids[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def streamed(stream: TextStream, parts: list[list[int]]) -> list[str]:
    return [stream.add(part, last=number == len(parts) - 1) for number, part in enumerate(parts)]


@settings(max_examples=200, deadline=None)
@given(text=TEXTS, places=st.lists(st.integers(0, 120), max_size=6))
def test_the_parts_are_the_text(bytewise: Tokenizer, text: str, places: list[int]) -> None:
    """A canvas may end inside a character."""
    deltas = streamed(TextStream(bytewise), cut(bytewise.encode(text), places))
    assert "".join(deltas) == text
    assert all("\ufffd" not in delta for delta in deltas)


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, VOCAB - 1), max_size=60), places=st.lists(st.integers(0, 60), max_size=6))
def test_the_parts_of_any_tokens_are_their_text(bytewise: Tokenizer, ids: list[int], places: list[int]) -> None:
    """Bytes that are no characters too, and special tokens, which give no text."""
    stream = TextStream(bytewise)
    assert "".join(streamed(stream, cut(ids, places))) == bytewise.decode(ids) == stream.text


@settings(max_examples=200, deadline=None)
@given(
    words=st.lists(
        st.sampled_from([[258], [259], [260], [261], [262], [263], [264], list("é東".encode()), [0]]), max_size=12
    ),
    places=st.lists(st.integers(0, 40), max_size=6),
)
def test_word_pieces_keep_their_spaces(pieces: Tokenizer, words: list[list[int]], places: list[int]) -> None:
    ids = [token if len(word) == 1 else token + 2 for word in words for token in word]
    stream = TextStream(pieces)
    assert "".join(streamed(stream, cut(ids, places))) == pieces.decode(ids)


@settings(max_examples=300, deadline=None)
@given(
    text=TEXTS,
    stop=st.lists(st.text(st.sampled_from("ab .é"), min_size=1, max_size=4), min_size=1, max_size=3),
    places=st.lists(st.integers(0, 120), max_size=6),
)
def test_the_text_ends_before_the_first_stop_string(
    bytewise: Tokenizer, text: str, stop: list[str], places: list[int]
) -> None:
    """Wherever the canvases end; nothing of it is given out before, and nothing after."""
    stream = TextStream(bytewise, stop)
    deltas = streamed(stream, cut(bytewise.encode(text), places))
    found = [place for each in stop if (place := text.find(each)) >= 0]
    assert "".join(deltas) == text[: min(found, default=len(text))] == stream.text
    assert stream.stopped == bool(found)


@settings(max_examples=100, deadline=None)
@given(text=TEXTS, place=st.integers(0, 120))
def test_no_more_is_held_back_than_may_begin_a_stop_string(bytewise: Tokenizer, text: str, place: int) -> None:
    assume("a.b" not in text)
    ids = bytewise.encode(text)[:place]
    whole = bytewise.decode(ids).rstrip("\ufffd")
    given_out = TextStream(bytewise, ["a.b"]).add(ids)
    kept = next(length for length in (2, 1, 0) if whole.endswith("a.b"[:length]))
    assert given_out == whole[: len(whole) - kept]
