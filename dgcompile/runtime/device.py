"""What a session needs from a GPU: memory, copies, one stream, graphs. And tensors that travel together.

Everything is enqueued on the device's one stream, in order, and done only after :meth:`Device.synchronise`. An address
is a plain integer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

HostBuffer = npt.NDArray[np.uint8]
"""Pinned host memory, uint8 [n]."""

ALIGNMENT = 256
"""Bytes. TensorRT wants tensors to start at multiples of it, and the driver's allocations do."""


class Device(Protocol):
    """One GPU, used from one thread at a time. Every method raises EngineError when the driver reports an error."""

    @property
    def name(self) -> str:
        """The product's name."""

    @property
    def stream(self) -> int:
        """Handle of the stream that everything is enqueued on."""

    def make_current(self) -> None:
        """Makes the device usable from the calling thread."""

    def memory(self) -> tuple[int, int]:
        """Bytes of device memory: free, in total."""

    def allocate(self, nbytes: int, purpose: str) -> int:
        """Device memory, at a multiple of :data:`ALIGNMENT`; ``purpose`` is for the message when there is too little.

        It holds what was there before.
        """

    def allocate_host(self, nbytes: int) -> HostBuffer:
        """Pinned host memory, zeroed."""

    def upload(self, target: int, source: HostBuffer) -> None:
        """Enqueues a copy to device memory. ``source`` is pinned and must not change before it is done."""

    def download(self, target: HostBuffer, source: int) -> None:
        """Enqueues a copy from device memory into pinned ``target``."""

    def copy(self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, height: int = 1) -> None:
        """Enqueues a copy of ``height`` pieces of ``width`` bytes within device memory.

        Pieces lie ``source_pitch`` and ``target_pitch`` bytes apart; sources and targets do not overlap.
        """

    def read(self, address: int, nbytes: int) -> HostBuffer:
        """A copy of device memory as it is when everything enqueued is done; slow, for tests and comparisons."""

    def zero(self, address: int, nbytes: int) -> None:
        """Enqueues zeroing."""

    def record(self) -> object:
        """An event that marks what is enqueued so far."""

    def wait(self, event: object) -> None:
        """Blocks until everything that an event marks is done."""

    def synchronise(self) -> None:
        """Blocks until everything enqueued is done."""

    def capture(self, enqueue: Callable[[], None]) -> object:
        """A graph of what ``enqueue`` enqueues; nothing of it is run."""

    def replay(self, graph: object) -> None:
        """Enqueues a graph."""

    def close(self) -> None:
        """Waits, then frees everything that was allocated."""


def aligned(nbytes: int) -> int:
    """``nbytes``, rounded up to :data:`ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Block:
    """Small tensors that travel together: one pinned host buffer and one device buffer, laid out alike.

    Args:
        device: where they go.
        tensors: dtype and shape by name, in the order in which they lie in memory.
        purpose: as of :meth:`Device.allocate`.

    Attributes:
        arrays: each tensor in the host buffer.
        addresses: each tensor's address on the device.
    """

    def __init__(
        self, device: Device, tensors: Mapping[str, tuple[npt.DTypeLike, tuple[int, ...]]], purpose: str
    ) -> None:
        self._device = device
        self._ranges: dict[str, tuple[int, int]] = {}
        end = 0
        for name, (dtype, shape) in tensors.items():
            nbytes = math.prod(shape) * np.dtype(dtype).itemsize
            self._ranges[name] = (end, end + nbytes)
            end = aligned(end + nbytes)
        self.nbytes = end
        self._host = device.allocate_host(end)
        self._address = device.allocate(end, purpose)
        # What is never written on the device (rows beyond a batch's) must be finite there too.
        device.zero(self._address, end)
        self.arrays: dict[str, npt.NDArray[np.generic]] = {
            name: self._host[slice(*self._ranges[name])].view(dtype).reshape(shape)
            for name, (dtype, shape) in tensors.items()
        }
        self.addresses = {name: self._address + begin for name, (begin, _) in self._ranges.items()}

    def upload(self, first: str, last: str) -> None:
        """Enqueues one copy to the device: the tensors from ``first`` to ``last``."""
        begin, end = self._ranges[first][0], self._ranges[last][1]
        self._device.upload(self._address + begin, self._host[begin:end])

    def download(self, first: str, last: str) -> None:
        """Enqueues one copy from the device: the tensors from ``first`` to ``last``."""
        begin, end = self._ranges[first][0], self._ranges[last][1]
        self._device.download(self._host[begin:end], self._address + begin)
