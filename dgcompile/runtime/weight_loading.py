"""Weights that are inputs of engines: loaded once into one piece of device memory, through pinned staging."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path

from dgcompile.engine_table import EngineTable, EngineTensor
from dgcompile.errors import BundleError
from dgcompile.progress import Progress
from dgcompile.runtime.device import Device, HostBuffer, aligned
from dgcompile.runtime.device_batch import ITEM_BYTES
from dgcompile.safetensors_file import StoredTensor, read_header

STAGING_BYTES = 32 << 20
"""Size of each of the two staging buffers: one is read into while the other is copied to the device."""


def stored_weights(tables: Sequence[EngineTable], weights_file: Path) -> dict[str, StoredTensor]:
    """Where the weights that the engines take as inputs lie in the weights store, each once, in the file's order.

    Raises:
        BundleError: the store lacks one of them, or holds it in another size.
    """
    store = read_header(weights_file, error=BundleError)
    found: dict[str, StoredTensor] = {}
    for table in tables:
        for tensor in table.weights:
            name = tensor.weight
            assert name is not None
            stored = store.get(name)
            if stored is None or stored.nbytes != _nbytes(tensor):
                state = f"has {stored.nbytes} bytes" if stored else "is missing"
                raise BundleError(
                    f"{weights_file}: {name} {state}",
                    expected=f"{_nbytes(tensor)} bytes, which the {table.graph} engine takes",
                    fix="build the bundle again with --overwrite",
                )
            found[name] = stored
    return dict(sorted(found.items(), key=lambda item: item[1].offset))


def _nbytes(tensor: EngineTensor) -> int:
    sizes = [axis for axis in tensor.shape if isinstance(axis, int)]
    if len(sizes) != len(tensor.shape):
        raise BundleError(f"the engine's weight {tensor.name} has the shape {list(tensor.shape)}", expected="numbers")
    return math.prod(sizes) * ITEM_BYTES[tensor.dtype]


def device_bytes(weights: Mapping[str, StoredTensor]) -> int:
    """Device memory that :func:`load_weights` needs."""
    return sum(aligned(stored.nbytes) for stored in weights.values())


def load_weights(
    device: Device, weights: Mapping[str, StoredTensor], progress: Progress, staging_bytes: int = STAGING_BYTES
) -> dict[str, int]:
    """Loads weights into one piece of device memory.

    Args:
        device: where they go.
        weights: by name, as :func:`stored_weights` gives them.
        progress: told the bytes.
        staging_bytes: size of each of the two staging buffers.

    Returns:
        Each weight's address, by name.

    Raises:
        BundleError: the file ended early.
        EngineError: the device failed.
        OSError: as the file system reports it.
    """
    if not weights:
        return {}
    start = device.allocate(device_bytes(weights), "weights")
    staging: list[tuple[HostBuffer, list[object]]] = [(device.allocate_host(staging_bytes), []) for _ in range(2)]
    addresses: dict[str, int] = {}
    turn = 0
    with progress.task("load weights", sum(stored.nbytes for stored in weights.values()), "bytes") as advance:
        for name, stored in weights.items():
            addresses[name] = start
            with stored.file.open("rb", buffering=0) as file:
                file.seek(stored.offset)
                for done in range(0, stored.nbytes, staging_bytes):
                    buffer, pending = staging[turn]
                    turn = 1 - turn
                    if pending:
                        device.wait(pending.pop())
                    piece = buffer[: min(staging_bytes, stored.nbytes - done)]
                    _fill(file, piece, stored)
                    device.upload(start + done, piece)
                    pending.append(device.record())
                    advance(len(piece))
            start += aligned(stored.nbytes)
        device.synchronise()
    return addresses


def _fill(file: FileIO, piece: HostBuffer, stored: StoredTensor) -> None:
    """Reads exactly ``piece``; one read may give less."""
    filled = 0
    while filled < len(piece):
        count = file.readinto(piece[filled:].data)
        if not count:
            raise BundleError(
                f"{stored.file} ended while it was read", fix="copy the bundle again; do not change it while it runs"
            )
        filled += count
