"""What the generation loop needs from a backend: a Session (the weights) that runs Batches (the rows' state)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dgcompile.errors import RequestError
from dgcompile.model_spec import ModelSpec
from dgcompile.runtime.kv_cache import Array, KVCache


class Cache(Protocol):
    """The KV cache of a batch's rows; see :class:`~dgcompile.runtime.kv_cache.KVCache` for what it means.

    Attributes:
        past_length: int32 [B], tokens that each row holds.
    """

    past_length: npt.NDArray[np.int32]

    @property
    def keys(self) -> Sequence[Array]:
        """Per layer [B, C_i, Hkv_i, D_i]; a copy where the cache lies in device memory."""

    @property
    def values(self) -> Sequence[Array]:
        """Like ``keys``."""

    def move_row(self, source: int, target: int) -> None:
        """Copies row ``source`` over row ``target``."""

    def clear_row(self, row: int, *, wipe: bool = False) -> None:
        """Empties a row for another prompt.

        Args:
            row: which.
            wipe: also zeroes its slots. Needed only where they may hold what is not finite: unused slots get weight 0
                in attention, and 0 x NaN is NaN.
        """


class Batch(ABC):
    """State of B rows that are generated together, as the loop sees it. Only sessions make batches.

    Attributes:
        cache: the rows' KV cache.
        canvas_length: L.
        temperature, entropy_bound: float32 [B], inputs of the next step.
        uniform: float32 [B, L] in [0, 1); noise_ids: int32 [B, L]; random numbers of the next step.
        argmax_ids: int32 [B, L]; accepted: bool [B, L]; entropy: float32 [B, L]; results of the last step.
        parity: which of the two copies of canvas and self-conditioning the next step reads.
    """

    cache: Cache
    canvas_length: int
    temperature: npt.NDArray[np.float32]
    entropy_bound: npt.NDArray[np.float32]
    uniform: npt.NDArray[np.float32]
    noise_ids: npt.NDArray[np.int32]
    argmax_ids: npt.NDArray[np.int32]
    accepted: npt.NDArray[np.bool_]
    entropy: npt.NDArray[np.float32]
    parity: int = 0

    @property
    @abstractmethod
    def canvas_ids(self) -> npt.NDArray[np.int32]:
        """int32 [B, L]: the canvases that the next denoising step reads."""

    @property
    @abstractmethod
    def self_conditioning(self) -> Array:
        """[B, L, H]: the self-conditioning that the next denoising step reads; all zeros on a canvas's first step.

        A copy where it lies in device memory.
        """

    def start_canvas(self, canvas_ids: npt.NDArray[np.int32], first: int = 0) -> None:
        """Starts a canvas in R rows from row ``first`` on: takes ``canvas_ids`` [R, L], zeroes the self-conditioning.

        Raises:
            RequestError: the canvases have another length than the model's.
        """
        if canvas_ids.shape[1:] != (self.canvas_length,):
            raise RequestError(
                f"a canvas of {canvas_ids.shape[-1]} tokens was given",
                expected=f"{self.canvas_length}, the length that the model was trained with",
            )
        self._start_canvas(canvas_ids, first)

    @abstractmethod
    def _start_canvas(self, canvas_ids: npt.NDArray[np.int32], first: int) -> None:
        """:meth:`start_canvas` with canvases of the right length."""

    @abstractmethod
    def swap_rows(self, one: int, other: int) -> None:
        """Makes two rows change places: their caches, canvases and self-conditioning, but not the results of a step."""

    def mean_entropy(self, rows: int) -> list[float]:
        """Mean of the positions' entropies, in nats, of each of the first ``rows`` rows after a denoising step.

        The same bits as numpy's ``mean``, which spends four times as long on finding out what it was given.
        """
        sums: npt.NDArray[np.float32] = np.add.reduce(self.entropy[:rows], axis=1)
        means: list[float] = (sums / np.float32(self.canvas_length)).tolist()
        return means

    def swap(self) -> None:
        """Makes what the last denoising step wrote the input of the next; sessions call it after each step."""
        self.parity = 1 - self.parity


class HostBatch(Batch):
    """A batch in host memory: its KV cache and every buffer of the denoiser, allocated once.

    Canvas and self-conditioning exist twice: a denoising step reads one copy and writes the other, then they change
    places, so that nothing is copied between steps.

    Args:
        spec: the model.
        cache: the rows' KV cache, with room for B rows.
        dtype: dtype of the self-conditioning signal.

    Attributes:
        bindings: what a session keeps about this batch's buffers; nobody else touches it.
    """

    cache: KVCache

    def __init__(self, spec: ModelSpec, cache: KVCache, dtype: npt.DTypeLike) -> None:
        rows, length = cache.batch, spec.canvas_length
        self.cache = cache
        self.canvas_length = length
        self.temperature = np.ones(rows, dtype=np.float32)
        self.entropy_bound = np.zeros(rows, dtype=np.float32)
        self.uniform = np.zeros((rows, length), dtype=np.float32)
        self.noise_ids = np.zeros((rows, length), dtype=np.int32)
        self.argmax_ids = np.zeros((rows, length), dtype=np.int32)
        self.accepted = np.zeros((rows, length), dtype=np.bool_)
        self.entropy = np.zeros((rows, length), dtype=np.float32)
        self.bindings: dict[Hashable, Any] = {}
        self._canvas_ids: list[npt.NDArray[np.int32]] = [np.zeros((rows, length), dtype=np.int32) for _ in range(2)]
        self._self_conditioning: list[Array] = [
            np.zeros((rows, length, spec.hidden_size), dtype=dtype) for _ in range(2)
        ]

    @property
    def canvas_ids(self) -> npt.NDArray[np.int32]:
        """int32 [B, L]: the canvases that the next denoising step reads."""
        return self._canvas_ids[self.parity]

    @property
    def next_canvas_ids(self) -> npt.NDArray[np.int32]:
        """int32 [B, L]: the buffer that the next denoising step writes."""
        return self._canvas_ids[1 - self.parity]

    @property
    def self_conditioning(self) -> Array:
        """[B, L, H]: the self-conditioning that the next denoising step reads; all zeros on a canvas's first step."""
        return self._self_conditioning[self.parity]

    @property
    def next_self_conditioning(self) -> Array:
        """[B, L, H]: the buffer that the next denoising step writes."""
        return self._self_conditioning[1 - self.parity]

    def _start_canvas(self, canvas_ids: npt.NDArray[np.int32], first: int) -> None:
        rows = slice(first, first + len(canvas_ids))
        self.canvas_ids[rows] = canvas_ids
        # Zeros mean "no signal". The signal of zero logits (the mean embedding) would be something else.
        self.self_conditioning[rows] = 0

    def swap_rows(self, one: int, other: int) -> None:
        """Makes two rows change places, as :meth:`Batch.swap_rows` says."""
        self.cache.swap_rows(one, other)
        for array in (self.canvas_ids, self.self_conditioning):
            array[[one, other]] = array[[other, one]]


class Session(Protocol):
    """A loaded bundle on one device. Batches are independent; each belongs to the session that made it."""

    @property
    def spec(self) -> ModelSpec:
        """The model."""

    @property
    def max_context(self) -> int:
        """Tokens (prompt and whole canvases) that a row may hold at most."""

    @property
    def max_batch(self) -> int | None:
        """Rows that a batch may have at most; None when there is no limit."""

    def new_batch(self, rows: int, capacity: int) -> Batch:
        """Allocates the state of ``rows`` rows whose caches hold up to ``capacity`` tokens each.

        Raises:
            RequestError: more rows or tokens than the session has room for.
            EngineError: the memory does not suffice.
        """

    def encode(
        self, batch: Batch, input_ids: npt.NDArray[np.int32], input_length: npt.NDArray[np.int32], first: int = 0
    ) -> None:
        """Runs the encoder on R rows and commits the new tokens to their caches.

        Args:
            batch: the rows.
            input_ids: int32 [R, N], right-padded.
            input_length: int32 [R], how many of the N tokens are real, at least 1.
            first: the first of the R rows.

        Raises:
            EngineError: the engine failed.
        """

    def denoise(self, batch: Batch, first: int, last: int) -> None:
        """Runs one denoising step on rows ``first`` .. ``last`` (inclusive); other rows' results become meaningless.

        Reads the batch's inputs, writes its results, and makes the next canvas and self-conditioning the current ones.

        Raises:
            EngineError: the engine failed.
        """
