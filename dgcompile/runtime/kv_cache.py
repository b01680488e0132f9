"""The KV cache in host memory: one ring of rows per layer, preallocated, written only with rows of real tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dgcompile.errors import RequestError
from dgcompile.model_spec import ModelSpec

Array = npt.NDArray[np.generic]

SWAP_BYTES = 256 << 10
"""Two rows change places in pieces of this size. Swapping two rows of 117 MB takes 30 ms with pieces of 64 KB to 1 MB,
and 60 ms with pieces of 5 MB or more, which leave the second-level cache (2-core AMD EPYC)."""


class KVCache:
    """Keys and values of B rows (sequences).

    Layer i holds ``keys[i]`` and ``values[i]``, [B, C_i, Hkv_i, D_i], with C_i = ``spec.cache_capacity(i, capacity)``.
    The token at position p lies in slot ``p % C_i``: keys are cached after RoPE, so their order in memory is free, and
    a sliding layer keeps exactly the last ``window`` tokens.

    Args:
        spec: the model.
        batch: B.
        capacity: tokens that a row can hold; full-attention layers get that many slots.
        dtype: dtype of keys and values.

    Attributes:
        past_length: int32 [B], tokens that each row holds; also the position of the row's next token.
    """

    def __init__(self, spec: ModelSpec, batch: int, capacity: int, dtype: npt.DTypeLike) -> None:
        self.batch = batch
        self.capacity = capacity
        self.past_length: npt.NDArray[np.int32] = np.zeros(batch, dtype=np.int32)
        # Zeros, not empty: slots beyond past_length get weight 0 in attention, and 0 x NaN would still be NaN.
        shapes = [
            (batch, spec.cache_capacity(index, capacity), layer.num_key_value_heads, layer.head_dim)
            for index, layer in enumerate(spec.layers)
        ]
        self.keys: list[Array] = [np.zeros(shape, dtype=dtype) for shape in shapes]
        self.values: list[Array] = [np.zeros(shape, dtype=dtype) for shape in shapes]

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(array.nbytes for array in (*self.keys, *self.values))

    def append(
        self,
        present_keys: Sequence[Array],
        present_values: Sequence[Array],
        input_length: npt.NDArray[np.int32],
        first: int = 0,
    ) -> None:
        """Commits new tokens to R rows and advances their ``past_length``.

        Args:
            present_keys: per layer [R, N, Hkv_i, D_i], the new tokens in order.
            present_values: likewise.
            input_length: int32 [R], how many of the N are real; the padding after them is not written.
            first: the first of the R rows.

        Raises:
            RequestError: a row would hold more tokens than the cache has room for.
        """
        past = self.past_length[first : first + len(input_length)]
        longest = int((past + input_length).max())
        if longest > self.capacity:
            raise RequestError(
                f"the KV cache was made for {self.capacity} tokens but a row would hold {longest}",
                fix="ask for fewer new tokens, or make the batch with a larger capacity",
            )
        for layer in range(len(self.keys)):
            for ring, present in (
                (self.keys[layer], present_keys[layer]),
                (self.values[layer], present_values[layer]),
            ):
                for row, (start, count) in enumerate(zip(past.tolist(), input_length.tolist(), strict=True)):
                    _write_ring(ring[first + row], present[row, :count], start)
        past += input_length

    def move_row(self, source: int, target: int) -> None:
        """Copies row ``source`` over row ``target``, so that a batch can drop a finished row between two canvases."""
        self.past_length[target] = self.past_length[source]
        for array in (*self.keys, *self.values):
            used = min(int(self.past_length[source]), array.shape[1])
            array[target, :used] = array[source, :used]

    def swap_rows(self, one: int, other: int) -> None:
        """Makes two rows change places. Slots that neither uses are left alone: they may never have been touched."""
        longest = int(self.past_length[[one, other]].max())
        self.past_length[[one, other]] = self.past_length[[other, one]]
        for array in (*self.keys, *self.values):
            used = min(longest, array.shape[1])
            # A row of the cache is large: in pieces, no memory of its size is needed, and the pieces stay in a cache.
            slots = max(1, SWAP_BYTES // array[0, 0].nbytes)
            for start in range(0, used, slots):
                piece = array[:, start : min(start + slots, used)]
                kept = piece[one].copy()
                piece[one] = piece[other]
                piece[other] = kept

    def clear_row(self, row: int, *, wipe: bool = False) -> None:
        """Empties a row for another prompt; see :meth:`dgcompile.runtime.session.Cache.clear_row`."""
        self.past_length[row] = 0
        if wipe:
            for array in (*self.keys, *self.values):
                array[row] = 0


def _write_ring(ring: Array, tokens: Array, start: int) -> None:
    """Writes ``tokens`` [n, ...] at positions ``start`` .. into ``ring`` [C, ...]; of more than C only the last C."""
    for source, slot, count in ring_pieces(start, len(tokens), len(ring)):
        ring[slot : slot + count] = tokens[source : source + count]


def ring_pieces(start: int, count: int, capacity: int) -> list[tuple[int, int, int]]:
    """How ``count`` new tokens at positions ``start`` .. fall into a ring: one piece, or two when they wrap.

    Args:
        start: position of the first of them.
        count: how many; of more than ``capacity`` only the last ``capacity`` are kept.
        capacity: slots of the ring.

    Returns:
        Per piece: the first of its tokens (0 is the one at ``start``), the slot it goes to, how many it has.
    """
    skipped = max(0, count - capacity)
    count -= skipped
    slot = (start + skipped) % capacity
    until_wrap = min(count, capacity - slot)
    pieces = [(skipped, slot, until_wrap), (skipped + until_wrap, 0, count - until_wrap)]
    return [piece for piece in pieces if piece[2]]
