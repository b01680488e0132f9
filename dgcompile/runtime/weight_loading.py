"""Weights that are inputs of engines: loaded once into one piece of device memory, through pinned staging."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dgcompile.engine_table import EngineTable, EngineTensor
from dgcompile.errors import BundleError
from dgcompile.progress import Progress
from dgcompile.runtime.device import Device, HostBuffer, aligned
from dgcompile.runtime.device_batch import ITEM_BYTES
from dgcompile.safetensors_file import StoredTensor, read_header

STAGING_BYTES = 32 << 20
"""Size of each of the two staging buffers: one is read into while the other is copied to the device."""

_ROWS_TOGETHER = 64
"""Rows of a matrix that are transposed at a time, so that each write fills a line of the processor's cache."""


@dataclass(frozen=True)
class EngineWeight:
    """A weight as engines are given it.

    Attributes:
        parts: the tensors of the weights store that it is made of.
        transposed: whether they are matrices that are laid side by side, transposed; one after another otherwise.
        item_bytes: of one element.
    """

    parts: tuple[StoredTensor, ...]
    transposed: bool
    item_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(part.nbytes for part in self.parts)


def stored_weights(tables: Sequence[EngineTable], weights_file: Path) -> dict[str, EngineWeight]:
    """Where the weights that the engines take as inputs lie in the weights store, each once, in the file's order.

    Raises:
        BundleError: the store lacks one of them or holds it in another size, or two engines mean different weights by
            one name.
    """
    store = read_header(weights_file, error=BundleError)
    found: dict[str, EngineWeight] = {}
    for table in tables:
        for tensor in table.weights:
            weight = _weight(table, tensor, store, weights_file)
            if found.setdefault(tensor.name, weight) != weight:
                raise BundleError(
                    f"the engines mean different weights by {tensor.name}",
                    fix="build the bundle again with --overwrite",
                )
    return dict(sorted(found.items(), key=lambda item: item[1].parts[0].offset))


def _weight(
    table: EngineTable, tensor: EngineTensor, store: Mapping[str, StoredTensor], weights_file: Path
) -> EngineWeight:
    advice = "build the bundle again with --overwrite"
    needed, names = _nbytes(tensor), " and ".join(tensor.parts)
    parts = [store.get(name) for name in tensor.parts]
    if None in parts:
        raise BundleError(
            f"{weights_file}: {tensor.parts[parts.index(None)]} is missing",
            expected=f"{needed} bytes in all, which the {table.graph} engine takes as {tensor.name}",
            fix=advice,
        )
    weight = EngineWeight(tuple(part for part in parts if part), tensor.transposed, ITEM_BYTES[tensor.dtype])
    if weight.nbytes != needed:
        raise BundleError(
            f"{weights_file}: {names} {'has' if len(parts) == 1 else 'have'} {weight.nbytes} bytes",
            expected=f"{needed} bytes, which the {table.graph} engine takes",
            fix=advice,
        )
    if tensor.transposed and any(
        len(part.shape) != 2
        or part.shape[1] != tensor.shape[-2]
        or part.nbytes != math.prod(part.shape) * weight.item_bytes
        for part in weight.parts
    ):
        raise BundleError(
            f"{weights_file}: the shapes of {names} are {', '.join(str(list(part.shape)) for part in weight.parts)}",
            expected=f"matrices with {tensor.shape[-2]} columns, which the {table.graph} engine takes transposed",
            fix=advice,
        )
    return weight


def _nbytes(tensor: EngineTensor) -> int:
    sizes = [axis for axis in tensor.shape if isinstance(axis, int)]
    if len(sizes) != len(tensor.shape):
        raise BundleError(f"the engine's weight {tensor.name} has the shape {list(tensor.shape)}", expected="numbers")
    return math.prod(sizes) * ITEM_BYTES[tensor.dtype]


def device_bytes(weights: Mapping[str, EngineWeight]) -> int:
    """Device memory that :func:`load_weights` needs."""
    return sum(aligned(weight.nbytes) for weight in weights.values())


def load_weights(
    device: Device, weights: Mapping[str, EngineWeight], progress: Progress, staging_bytes: int = STAGING_BYTES
) -> dict[str, int]:
    """Loads weights into one piece of device memory.

    Beside the staging buffers, host memory is needed for two copies of the largest transposed weight at most.

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
    with progress.task("load weights", sum(weight.nbytes for weight in weights.values()), "bytes") as advance:
        for name, weight in weights.items():
            addresses[name] = start
            source = _transposed(weight) if weight.transposed else _one_after_another(weight)
            for done in range(0, weight.nbytes, staging_bytes):
                buffer, pending = staging[turn]
                turn = 1 - turn
                if pending:
                    device.wait(pending.pop())
                piece = buffer[: min(staging_bytes, weight.nbytes - done)]
                source(piece)
                device.upload(start + done, piece)
                pending.append(device.record())
                advance(len(piece))
            start += aligned(weight.nbytes)
        device.synchronise()
    return addresses


def _one_after_another(weight: EngineWeight) -> Callable[[HostBuffer], None]:
    """What fills buffers with the weight's next bytes, as they lie in the store."""
    places = iter(weight.parts)
    part, done = next(places), 0

    def fill(piece: HostBuffer) -> None:
        nonlocal part, done
        filled = 0
        while filled < len(piece):
            if done == part.nbytes:
                part, done = next(places), 0
            count = min(len(piece) - filled, part.nbytes - done)
            _read(part, done, piece[filled : filled + count])
            filled, done = filled + count, done + count

    return fill


def _transposed(weight: EngineWeight) -> Callable[[HostBuffer], None]:
    """What fills buffers with the next bytes of the weight's parts laid side by side, transposed."""
    item, columns = weight.item_bytes, weight.parts[0].shape[1]
    whole = np.empty((columns, sum(part.shape[0] for part in weight.parts)), dtype=f"V{item}")
    first = 0
    for part in weight.parts:
        rows = np.empty(part.nbytes, dtype=np.uint8)
        _read(part, 0, rows)
        matrix = rows.view(f"V{item}").reshape(part.shape)
        for row in range(0, len(matrix), _ROWS_TOGETHER):
            together = matrix[row : row + _ROWS_TOGETHER]
            whole[:, first + row : first + row + len(together)] = together.T
        first += len(matrix)
    rest = whole.reshape(-1).view(np.uint8)

    def fill(piece: HostBuffer) -> None:
        nonlocal rest
        piece[:] = rest[: len(piece)]
        rest = rest[len(piece) :]

    return fill


def _read(stored: StoredTensor, begin: int, piece: HostBuffer) -> None:
    """Reads exactly ``piece``, from the byte ``begin`` of a tensor; one read may give less."""
    with stored.file.open("rb", buffering=0) as file:
        file.seek(stored.offset + begin)
        filled = 0
        while filled < len(piece):
            count = file.readinto(piece[filled:].data)
            if not count:
                raise BundleError(
                    f"{stored.file} ended while it was read",
                    fix="copy the bundle again; do not change it while it runs",
                )
            filled += count
