"""The random numbers of one row: the initial canvases and what each denoising step draws.

Counter-based, so that a number depends only on (seed, canvas, step, position): not on the batch a row shares, nor on
how many steps another canvas took. Raw Philox4x64-10 words (Salmon et al., "Parallel random numbers: as easy as 1, 2,
3", SC11) are turned into numbers by the arithmetic written here, so that the same seed gives the same numbers with
every numpy version and on every backend.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dgcompile.errors import RequestError

MAX_SEED = 2**64 - 1
"""Largest seed: it is one word of Philox's key."""

MAX_VOCAB_SIZE = 2**24
"""Largest vocabulary: a token id is ``floor(word / 2**24 * vocab_size / 2**40)`` in 64-bit arithmetic."""

_UNIFORM_SHIFT = np.uint64(64 - 24)
_UNIFORM_SCALE = np.float32(2.0**-24)
_TOKEN_SHIFT, _TOKEN_RANGE_SHIFT = np.uint64(24), np.uint64(40)


class RowRandom:
    """Random numbers of one row of a batch.

    Args:
        seed: 0 .. 2**64 - 1; rows with equal seeds draw equal numbers.
        canvas_length: L, positions of a canvas.
        vocab_size: token ids are below this.

    Raises:
        RequestError: the seed is no integer in that range.
    """

    def __init__(self, seed: int, canvas_length: int, vocab_size: int) -> None:
        if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or not 0 <= seed <= MAX_SEED:
            raise RequestError(f"the seed is {seed!r}", expected=f"an integer from 0 to {MAX_SEED}")
        if vocab_size > MAX_VOCAB_SIZE:
            raise RequestError(f"the vocabulary has {vocab_size} tokens", expected=f"at most {MAX_VOCAB_SIZE}")
        self._length = canvas_length
        self._vocab_size = np.uint64(vocab_size)
        self._philox = np.random.Philox(key=np.array([seed, 0], dtype=np.uint64))
        # Making a generator costs more than drawing from it, so one is kept and its counter is set for each draw.
        self._state = self._philox.state
        self._counter: npt.NDArray[np.uint64] = self._state["state"]["counter"]

    def initial_canvas(self, canvas: int) -> npt.NDArray[np.int32]:
        """The uniformly random token ids, int32 [L], that canvas number ``canvas`` (from 0) starts from."""
        return self._token_ids(self._words(canvas, 0, self._length))

    def step(self, canvas: int, step: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
        """What denoising step ``step`` (from 1, in the order they run) of a canvas draws.

        Returns:
            uniform, float32 [L] in [0, 1), which picks the sampled tokens; noise_ids, int32 [L], which renoise.
        """
        words = self._words(canvas, step, 2 * self._length)
        uniform = words[: self._length]
        uniform >>= _UNIFORM_SHIFT
        # Exact in any floating-point type: 24 bits times a power of two.
        return uniform.astype(np.float32) * _UNIFORM_SCALE, self._token_ids(words[self._length :])

    def _words(self, canvas: int, step: int, count: int) -> npt.NDArray[np.uint64]:
        # Philox counts up in the first word, so streams of other (step, canvas) pairs can never overlap.
        self._counter[:] = (0, step, canvas, 0)
        self._philox.state = self._state
        return self._philox.random_raw(count)

    def _token_ids(self, words: npt.NDArray[np.uint64]) -> npt.NDArray[np.int32]:
        """Turns words into token ids; the words' memory is used up."""
        # Multiply and shift; the bias against a perfect uniform draw is below vocab_size / 2**40.
        words >>= _TOKEN_SHIFT
        words *= self._vocab_size
        words >>= _TOKEN_RANGE_SHIFT
        return words.astype(np.int32)
