"""The ring: whatever is appended in whatever pieces, slot p % C holds position p, and nothing else is touched."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dgcompile.errors import RequestError
from dgcompile.runtime.kv_cache import KVCache
from tests.runtime.toy_model import WINDOW, toy_spec

CAPACITY = 40


def numbered(cache: KVCache, lengths: list[int], new_tokens: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Rows for ``append`` that hold 100 * row + position (negative in values); padding is NaN."""
    keys, values = [], []
    for ring in cache.keys:
        rows = np.full((len(lengths), new_tokens, *ring.shape[2:]), np.nan, dtype=np.float32)
        for row, count in enumerate(lengths):
            positions = cache.past_length[row] + np.arange(count)
            rows[row, :count] = (100 * row + positions)[:, None, None]
        keys.append(rows)
        values.append(-rows)
    return keys, values


@given(st.data())
def test_appending_in_pieces_keeps_the_newest_tokens_in_their_slots(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 3))
    cache = KVCache(toy_spec(), rows, CAPACITY, np.float32)
    for _ in range(data.draw(st.integers(1, 5))):
        room = CAPACITY - cache.past_length
        touched = data.draw(st.integers(1, rows))
        lengths = [data.draw(st.integers(0, int(room[row]))) for row in range(touched)]
        new_tokens = max(lengths) + data.draw(st.integers(0, 2))
        cache.append(*numbered(cache, lengths, new_tokens), np.array(lengths, dtype=np.int32))
    for ring, values in zip(cache.keys, cache.values, strict=True):
        capacity = ring.shape[1]
        for row in range(rows):
            past = int(cache.past_length[row])
            expected = np.zeros(capacity)
            for position in range(max(0, past - capacity), past):
                expected[position % capacity] = 100 * row + position
            assert np.array_equal(ring[row], np.broadcast_to(expected[:, None, None], ring[row].shape))
            assert np.array_equal(values[row], -ring[row])


def test_shapes_follow_the_layers() -> None:
    cache = KVCache(toy_spec(), 3, CAPACITY, np.float16)
    assert [array.shape for array in cache.keys] == [(3, WINDOW, 1, 2), (3, CAPACITY, 2, 1)]
    assert [array.dtype for array in cache.values] == [np.float16, np.float16]
    assert cache.nbytes == 2 * (3 * WINDOW * 2 * 2 + 3 * CAPACITY * 2 * 2)


def test_a_short_capacity_shortens_the_ring() -> None:
    assert [array.shape[1] for array in KVCache(toy_spec(), 1, 5, np.float32).keys] == [5, 5]


def test_too_many_tokens_are_refused_before_anything_is_written() -> None:
    cache = KVCache(toy_spec(), 2, CAPACITY, np.float32)
    lengths = np.array([1, CAPACITY + 1], dtype=np.int32)
    with pytest.raises(RequestError, match="made for 40 tokens but a row would hold 41"):
        cache.append(*numbered(cache, lengths.tolist(), CAPACITY + 1), lengths)
    assert cache.past_length.tolist() == [0, 0]
    assert not cache.keys[1].any()


def test_move_row() -> None:
    cache = KVCache(toy_spec(), 3, CAPACITY, np.float32)
    cache.append(*numbered(cache, [3, 9, 12], 12), np.array([3, 9, 12], dtype=np.int32))
    cache.move_row(2, 0)
    assert cache.past_length.tolist() == [12, 9, 12]
    for array in (*cache.keys, *cache.values):
        assert np.array_equal(array[0], array[2])
        assert not np.array_equal(array[1], array[2])
