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

STEPS_AHEAD = 8
"""Steps of a canvas that are drawn at once; a canvas takes some 16. One at a time, each would take 0.02 ms, but 0.2 ms
right after an engine has used the processor's caches; eight at once take 0.11 ms (2-core AMD EPYC, canvas of 256)."""

_UNIFORM_SHIFT = np.uint64(64 - 24)
_UNIFORM_SCALE = np.float32(2.0**-24)


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
        self._block = (-1, -1)  # canvas and block of steps that were drawn last
        self._uniform: npt.NDArray[np.float32]
        self._noise_ids: npt.NDArray[np.int32]

    def initial_canvas(self, canvas: int) -> npt.NDArray[np.int32]:
        """The uniformly random token ids, int32 [L], that canvas number ``canvas`` (from 0) starts from."""
        return self._token_ids(self._words(canvas, 0, self._length))

    def step(self, canvas: int, step: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
        """What denoising step ``step`` (from 1, in the order they run) of a canvas draws.

        Returns:
            uniform, float32 [L] in [0, 1), which picks the sampled tokens; noise_ids, int32 [L], which renoise.
        """
        block, index = divmod(step, STEPS_AHEAD)
        if (canvas, block) != self._block:
            self._uniform, self._noise_ids = self._draw(canvas, block * STEPS_AHEAD)
            self._block = canvas, block
        return self._uniform[index], self._noise_ids[index]

    def _draw(self, canvas: int, first: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
        """What :data:`STEPS_AHEAD` steps from ``first`` on draw: uniform and noise_ids, [STEPS_AHEAD, L] each."""
        words = np.empty((STEPS_AHEAD, 2 * self._length), dtype=np.uint64)
        for index in range(STEPS_AHEAD):
            words[index] = self._words(canvas, first + index, 2 * self._length)
        # Exact in any floating-point type: 24 bits times a power of two.
        uniform = (words[:, : self._length] >> _UNIFORM_SHIFT).astype(np.float32)
        uniform *= _UNIFORM_SCALE
        return uniform, self._token_ids(words[:, self._length :])

    def _words(self, canvas: int, step: int, count: int) -> npt.NDArray[np.uint64]:
        # Philox counts up in the first word, so streams of other (step, canvas) pairs can never overlap.
        self._counter[:] = (0, step, canvas, 0)
        self._philox.state = self._state
        return self._philox.random_raw(count)

    def _token_ids(self, words: npt.NDArray[np.uint64]) -> npt.NDArray[np.int32]:
        # Multiply and shift; the bias against a perfect uniform draw is below vocab_size / 2**40.
        return (((words >> np.uint64(24)) * self._vocab_size) >> np.uint64(40)).astype(np.int32)
