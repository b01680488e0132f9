"""Random numbers: reproducible for ever, independent of order, in range, uniform."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dgcompile.errors import RequestError
from dgcompile.runtime.random_numbers import MAX_SEED, RowRandom

SEEDS = st.integers(0, MAX_SEED)
COUNTS = st.integers(0, 1000)


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x64-10 as its paper defines it, in Python integers."""
    a, b, c, d = counter
    low, high = key
    for _ in range(10):
        first, second = a * 0xD2E7470EE14C6C93, c * 0xCA5A826395121157
        a, b, c, d = second >> 64 ^ b ^ low, second % 2**64, first >> 64 ^ d ^ high, first % 2**64
        low, high = (low + 0x9E3779B97F4A7C15) % 2**64, (high + 0xBB67AE8584CAA73B) % 2**64
    return [a, b, c, d]


@given(SEEDS, COUNTS, st.integers(1, 1000), st.integers(2, 2**24))
def test_numbers_are_those_of_the_paper(seed: int, canvas: int, step: int, vocab_size: int) -> None:
    """A change would change every answer that anyone got with a seed."""
    random = RowRandom(seed, 6, vocab_size)
    # The first counter is 1: numpy counts up before it draws.
    words = [word for block in (1, 2, 3) for word in philox([block, step, canvas, 0], [seed, 0])]
    uniform, noise = random.step(canvas, step)
    assert uniform.tolist() == [(word >> 40) / 2**24 for word in words[:6]]
    assert noise.tolist() == [((word >> 24) * vocab_size) >> 40 for word in words[6:]]
    words = [word for block in (1, 2) for word in philox([block, 0, canvas, 0], [seed, 0])]
    assert random.initial_canvas(canvas).tolist() == [((word >> 24) * vocab_size) >> 40 for word in words[:6]]


@given(SEEDS, COUNTS, st.integers(1, 1000))
def test_a_draw_does_not_depend_on_what_was_drawn_before(seed: int, canvas: int, step: int) -> None:
    used = RowRandom(seed, 8, 1000)
    used.initial_canvas(3)
    used.step(1, 1)
    uniform, noise = used.step(canvas, step)
    fresh_uniform, fresh_noise = RowRandom(seed, 8, 1000).step(canvas, step)
    assert np.array_equal(uniform, fresh_uniform)
    assert np.array_equal(noise, fresh_noise)


@given(SEEDS, COUNTS, COUNTS, st.integers(1, 2**24), st.integers(1, 300))
def test_ranges_and_types(seed: int, canvas: int, step: int, vocab_size: int, length: int) -> None:
    random = RowRandom(seed, length, vocab_size)
    uniform, noise = random.step(canvas, step)
    for ids in (noise, random.initial_canvas(canvas)):
        assert ids.dtype == np.int32
        assert ids.shape == (length,)
        assert ids.min() >= 0
        assert ids.max() < vocab_size
    assert uniform.dtype == np.float32
    assert uniform.shape == (length,)
    assert uniform.min() >= 0
    assert uniform.max() < 1


def test_uniform_over_the_vocabulary() -> None:
    random = RowRandom(1, 60_000, 6)
    uniform, noise = random.step(0, 1)
    # 10,000 expected per bin, standard deviation 91.
    assert np.abs(np.bincount(noise, minlength=6) - 10_000).max() < 460
    assert np.abs(np.histogram(uniform, bins=6, range=(0, 1))[0] - 10_000).max() < 460
    assert abs(np.corrcoef(uniform, noise)[0, 1]) < 0.02


def test_seeds_steps_and_canvases_differ() -> None:
    draws = {
        tuple(RowRandom(seed, 16, 2**20).step(canvas, step)[1].tolist())
        for seed in range(4)
        for canvas in range(4)
        for step in range(1, 5)
    }
    assert len(draws) == 64


@pytest.mark.parametrize("seed", [-1, MAX_SEED + 1, 1.5, "7", None, True])
def test_impossible_seeds_are_refused(seed: object) -> None:
    with pytest.raises(RequestError, match="seed is"):
        RowRandom(seed, 4, 10)  # type: ignore[arg-type]


def test_largest_vocabulary() -> None:
    with pytest.raises(RequestError, match="vocabulary has 16777217 tokens"):
        RowRandom(0, 4, 2**24 + 1)
