"""The state of a batch in device memory: the KV cache, the canvases, and the host's copies of what is small."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from dgcompile.contract import past_names, present_names
from dgcompile.engine_table import EngineDType
from dgcompile.errors import RequestError
from dgcompile.model_spec import ModelSpec
from dgcompile.runtime.device import Block, Device, aligned
from dgcompile.runtime.kv_cache import Array, ring_pieces
from dgcompile.runtime.session import Batch

ITEM_BYTES: Mapping[EngineDType, int] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8e4m3fn": 1,
    "int8": 1,
    "int32": 4,
    "bool": 1,
}
"""Bytes of one element."""

INPUTS = ("past_length", "temperature", "entropy_bound", "uniform", "noise_ids")
"""The denoiser's inputs that come from the host, in the order in which they lie in memory."""

# The two canvases enclose the other results, so that one piece of memory holds the results and the canvas just written,
# whichever it is.
_OUTPUTS = ("canvas_ids.0", "argmax_ids", "accepted", "entropy", "canvas_ids.1")


@dataclass(frozen=True)
class _Group:
    """Layers of equal shape. Their keys and values lie in memory one after another, so that one copy moves all of them.

    Attributes:
        layers: their numbers.
        capacity: slots of each ring, C.
        token_bytes: one token's keys (or values) in one layer.
        offset: of the first ring in the cache's memory.
        pitch: bytes from one ring to the next.
    """

    layers: tuple[int, ...]
    capacity: int
    token_bytes: int
    offset: int
    pitch: int

    @property
    def rings(self) -> int:
        """Keys and values of each layer."""
        return 2 * len(self.layers)


class CacheLayout:
    """Where everything of a cache lies in one piece of device memory.

    Args:
        spec: the model.
        rows: B.
        tokens: tokens per row; full-attention layers get that many slots, sliding ones at most their window.
        item_bytes: of one element.
        sliding: whether sliding layers get only as many slots as their window. The encoder's new rows are laid out the
            same way, without.
    """

    def __init__(self, spec: ModelSpec, rows: int, tokens: int, item_bytes: int, *, sliding: bool = True) -> None:
        self.groups: list[_Group] = []
        self.offsets: dict[int, tuple[int, int]] = {}  # by layer: of keys and values
        shapes: dict[tuple[int, int], list[int]] = {}
        for index, layer in enumerate(spec.layers):
            capacity = spec.cache_capacity(index, tokens) if sliding else tokens
            # Two kinds of layers may have equal shapes here but different rings, so the kind counts too.
            key = (spec.cache_capacity(index, spec.max_position_embeddings), layer.num_key_value_heads * layer.head_dim)
            shapes.setdefault(key, []).append(index)
        end = 0
        for (_, width), layers in shapes.items():
            capacity = spec.cache_capacity(layers[0], tokens) if sliding else tokens
            pitch = aligned(rows * capacity * width * item_bytes)
            group = _Group(tuple(layers), capacity, width * item_bytes, end, pitch)
            self.groups.append(group)
            for place, layer_index in enumerate(layers):
                self.offsets[layer_index] = (end + 2 * place * pitch, end + (2 * place + 1) * pitch)
            end += group.rings * pitch
        self.nbytes = end


class DeviceKVCache:
    """Keys and values of B rows in device memory, with the meaning of :class:`~dgcompile.runtime.kv_cache.KVCache`.

    Args:
        device: where it lies.
        spec: the model.
        rows: B.
        tokens: tokens that a row can hold.
        dtype: of keys and values.
        past_length: int32 [B]; the array that is uploaded before each step.

    Attributes:
        capacity: tokens that a row may hold now, at most ``tokens``.
        past_length: int32 [rows in use], tokens that each row holds.
        layout: where the rings lie.
    """

    def __init__(
        self,
        device: Device,
        spec: ModelSpec,
        rows: int,
        tokens: int,
        dtype: EngineDType,
        past_length: npt.NDArray[np.int32],
    ) -> None:
        self._device, self._spec, self._rows, self._dtype = device, spec, rows, dtype
        self.layout = CacheLayout(spec, rows, tokens, ITEM_BYTES[dtype])
        self._past_length = past_length
        self.start(rows, tokens)
        self.address = device.allocate(self.layout.nbytes, "cache")
        # Slots beyond past_length get weight 0 in attention, and 0 x NaN would still be NaN.
        device.zero(self.address, self.layout.nbytes)

    def start(self, rows: int, capacity: int) -> None:
        """Empties the cache for a batch of ``rows`` rows of up to ``capacity`` tokens."""
        self._past_length[:] = 0
        self.past_length = self._past_length[:rows]
        self.capacity = capacity

    def addresses(self, first: int = 0) -> dict[str, int]:
        """Address of each ``past_key_values`` tensor that begins with row ``first``."""
        return {
            name: self.address + self.layout.offsets[layer][which] + first * group.capacity * group.token_bytes
            for group in self.layout.groups
            for layer in group.layers
            for which, name in enumerate(past_names(layer))
        }

    def may_begin_with(self, first: int) -> bool:
        """Whether tensors that begin with row ``first`` are aligned as engines want it: in all but tiny models."""
        row_bytes = (group.capacity * group.token_bytes for group in self.layout.groups)
        return all(aligned(first * size) == first * size for size in row_bytes)

    def check_room(self, input_length: npt.NDArray[np.int32], first: int = 0) -> None:
        """Refuses new tokens for R rows from ``first`` on that do not fit.

        Raises:
            RequestError: a row would hold more tokens than the cache has room for.
        """
        longest = int((self.past_length[first : first + len(input_length)] + input_length).max())
        if longest > self.capacity:
            raise RequestError(
                f"the KV cache was made for {self.capacity} tokens but a row would hold {longest}",
                fix="ask for fewer new tokens, or make the batch with a larger capacity",
            )

    def present_addresses(
        self,
        scratch: int,
        scratch_layout: CacheLayout,
        new_tokens: int,
        input_length: npt.NDArray[np.int32],
        first: int = 0,
    ) -> dict[str, int]:
        """Where the encoder is to write each ``present`` tensor: into the ring where that is safe, else into scratch.

        It is safe for one row (``first``) without padding whose new tokens do not wrap: they follow one another, and
        the same call gives those slots no weight.
        """
        addresses = {}
        for group, scratch_group in zip(self.layout.groups, scratch_layout.groups, strict=True):
            direct = self._is_direct(group, new_tokens, input_length, first)
            start = self.address + self._next_slot(group, first) * group.token_bytes if direct else scratch
            offsets = (self.layout if direct else scratch_layout).offsets
            for layer in scratch_group.layers:
                for name, offset in zip(present_names(layer), offsets[layer], strict=True):
                    addresses[name] = start + offset
        return addresses

    def append(
        self,
        scratch: int,
        scratch_layout: CacheLayout,
        new_tokens: int,
        input_length: npt.NDArray[np.int32],
        first: int = 0,
        skipped: int = 0,
    ) -> None:
        """Enqueues the copies of new tokens out of scratch, as far as the encoder did not write them in place.

        ``past_length`` is advanced by the caller, once nothing enqueued reads it any more.

        Args:
            scratch: address of the encoder's outputs, [R, N, Hkv_i, D_i] each.
            scratch_layout: where each lies.
            new_tokens: N, padding included.
            input_length: int32 [R], how many of the N are real; the padding after them is not copied.
            first: the first of the R rows.
            skipped: rows that lie before the R ones in scratch.
        """
        past = self.past_length[first : first + len(input_length)].tolist()
        for group, source_group in zip(self.layout.groups, scratch_layout.groups, strict=True):
            if not skipped and self._is_direct(group, new_tokens, input_length, first):
                continue
            width = group.token_bytes
            for row, (start, count) in enumerate(zip(past, input_length.tolist(), strict=True)):
                for token, slot, length in ring_pieces(start, count, group.capacity):
                    self._device.copy(
                        self.address + group.offset + ((first + row) * group.capacity + slot) * width,
                        group.pitch,
                        scratch + source_group.offset + ((skipped + row) * new_tokens + token) * width,
                        source_group.pitch,
                        length * width,
                        group.rings,
                    )

    def _is_direct(self, group: _Group, new_tokens: int, input_length: npt.NDArray[np.int32], first: int) -> bool:
        start = self._next_slot(group, first) * group.token_bytes
        return (
            len(input_length) == 1
            and int(input_length[0]) == new_tokens
            and int(self.past_length[first]) + new_tokens <= group.capacity
            and aligned(start) == start
        )

    def _next_slot(self, group: _Group, row: int) -> int:
        """Slots from the beginning of a ring's tensor to a row's next token, as long as it does not wrap."""
        return row * group.capacity + int(self.past_length[row])

    def move_row(self, source: int, target: int) -> None:
        """Copies row ``source`` over row ``target``."""
        self.past_length[target] = self.past_length[source]
        for group in self.layout.groups:
            first, row_bytes = self.address + group.offset, group.capacity * group.token_bytes
            used = min(int(self.past_length[source]), group.capacity) * group.token_bytes
            if used:
                self._device.copy(
                    first + target * row_bytes, group.pitch, first + source * row_bytes, group.pitch, used, group.rings
                )

    def swap_rows(self, one: int, other: int, scratch: int, scratch_bytes: int) -> None:
        """Makes two rows change places, through ``scratch_bytes`` of device memory that hold nothing of worth."""
        longest = int(self.past_length[[one, other]].max())
        self.past_length[[one, other]] = self.past_length[[other, one]]
        for group in self.layout.groups:
            row_bytes, used = group.capacity * group.token_bytes, min(longest, group.capacity) * group.token_bytes
            begin = 0
            while begin < used:
                # As many rings at once as the scratch memory has room for, or a part of one.
                width = min(used - begin, scratch_bytes)
                height = min(scratch_bytes // width, group.rings)
                for ring in range(0, group.rings, height):
                    start = self.address + group.offset + ring * group.pitch + begin
                    first, second = start + one * row_bytes, start + other * row_bytes
                    rings = min(height, group.rings - ring)
                    self._device.copy(scratch, width, first, group.pitch, width, rings)
                    self._device.copy(first, group.pitch, second, group.pitch, width, rings)
                    self._device.copy(second, group.pitch, scratch, width, width, rings)
                begin += width

    def clear_row(self, row: int, *, wipe: bool = False) -> None:
        """Empties a row for another prompt; see :meth:`dgcompile.runtime.session.Cache.clear_row`."""
        self.past_length[row] = 0
        if wipe:
            for group in self.layout.groups:
                row_bytes = group.capacity * group.token_bytes
                for ring in range(group.rings):
                    start = self.address + group.offset + ring * group.pitch + row * row_bytes
                    self._device.zero(start, row_bytes)

    @property
    def keys(self) -> list[Array]:
        """Per layer [rows in use, C_i, Hkv_i, D_i]: a copy, for tests and comparisons. bfloat16 becomes float32."""
        return self._downloaded(0)

    @property
    def values(self) -> list[Array]:
        """Like ``keys``."""
        return self._downloaded(1)

    def _downloaded(self, which: int) -> list[Array]:
        arrays = []
        for index, layer in enumerate(self._spec.layers):
            capacity = next(group.capacity for group in self.layout.groups if index in group.layers)
            shape = (self._rows, capacity, layer.num_key_value_heads, layer.head_dim)
            address = self.address + self.layout.offsets[index][which]
            arrays.append(download(self._device, address, self._dtype, shape)[: len(self.past_length)])
        return arrays


def download(device: Device, address: int, dtype: EngineDType, shape: tuple[int, ...]) -> Array:
    """A copy of a tensor, for tests and comparisons. It waits; bfloat16, which numpy lacks, becomes float32."""
    host = device.read(address, math.prod(shape) * ITEM_BYTES[dtype])
    if dtype == "bfloat16":
        return (host.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(shape)
    return host.view(dtype).reshape(shape)


class DeviceState:
    """Every device buffer of a batch, for as many rows and tokens as a session allows. Batches use it one at a time.

    The sizes do not depend on the batch: shapes that a step had before need no new kernels, and a graph stays valid.

    Args:
        device: where it lies.
        spec: the model.
        rows: the session's ``max_batch``.
        tokens: the session's ``max_context``.
        dtype: of the cache and the self-conditioning signal.

    Attributes:
        inputs: the denoiser's small inputs, as :data:`INPUTS` names them.
        outputs: its small outputs and both canvases.
        self_conditioning: address of each of the two copies.
        cache: the rows' KV cache.
        steps: what a session keeps about the steps on these buffers.
    """

    def __init__(self, device: Device, spec: ModelSpec, rows: int, tokens: int, dtype: EngineDType) -> None:
        length = spec.canvas_length
        self.inputs = Block(
            device,
            {
                "past_length": (np.int32, (rows,)),
                "temperature": (np.float32, (rows,)),
                "entropy_bound": (np.float32, (rows,)),
                "uniform": (np.float32, (rows, length)),
                "noise_ids": (np.int32, (rows, length)),
            },
            "inputs",
        )
        self.outputs = Block(
            device,
            {
                "canvas_ids.0": (np.int32, (rows, length)),
                "argmax_ids": (np.int32, (rows, length)),
                "accepted": (np.bool_, (rows, length)),
                "entropy": (np.float32, (rows, length)),
                "canvas_ids.1": (np.int32, (rows, length)),
            },
            "outputs",
        )
        self.signal_shape = (rows, length, spec.hidden_size)
        self.signal_bytes = math.prod(self.signal_shape) * ITEM_BYTES[dtype]
        self.self_conditioning = tuple(device.allocate(self.signal_bytes, "self-conditioning") for _ in range(2))
        for address in self.self_conditioning:
            device.zero(address, self.signal_bytes)
        past_length = cast("npt.NDArray[np.int32]", self.inputs.arrays["past_length"])
        self.cache = DeviceKVCache(device, spec, rows, tokens, dtype, past_length)
        self.steps: dict[tuple[int, int], object] = {}

    def step_addresses(self, parity: int) -> dict[str, int]:
        """Address of every input and output of the denoiser, weights aside.

        Args:
            parity: which copy of canvas and self-conditioning is read; the other one is written.
        """
        outputs = self.outputs.addresses
        return {
            **self.inputs.addresses,
            **self.cache.addresses(),
            "canvas_ids": outputs[f"canvas_ids.{parity}"],
            "next_canvas_ids": outputs[f"canvas_ids.{1 - parity}"],
            "self_conditioning": self.self_conditioning[parity],
            "next_self_conditioning": self.self_conditioning[1 - parity],
            **{name: outputs[name] for name in ("argmax_ids", "accepted", "entropy")},
        }

    def download_step(self, parity: int) -> None:
        """Enqueues the one copy of what a step wrote; ``parity`` as in :meth:`step_addresses`."""
        first, last = (_OUTPUTS[1], _OUTPUTS[-1]) if parity == 0 else (_OUTPUTS[0], _OUTPUTS[-2])
        self.outputs.download(first, last)


class DeviceBatch(Batch):
    """A batch whose state lies in device memory. The arrays are pinned host memory: the small inputs and results.

    Args:
        owner: whatever frees the memory when it is dropped; kept alive as long as the batch.
        device: where it lies.
        state: the buffers; nobody else uses them as long as this batch lives.
        spec: the model.
        rows: B, at most the state's.
        capacity: tokens that a row may hold, at most the state's.
        dtype: of the self-conditioning signal.
        scratch: address and bytes of device memory that nothing relies on between two calls of the session.
    """

    cache: DeviceKVCache

    def __init__(
        self,
        owner: object,
        device: Device,
        state: DeviceState,
        spec: ModelSpec,
        rows: int,
        capacity: int,
        dtype: EngineDType,
        scratch: tuple[int, int],
    ) -> None:
        self._owner, self._device, self._dtype, self._scratch = owner, device, dtype, scratch
        self.state = state
        self.rows = rows
        self.canvas_length = spec.canvas_length
        self.cache = state.cache
        self.cache.start(rows, capacity)
        inputs, outputs = state.inputs.arrays, state.outputs.arrays
        self.temperature = cast("npt.NDArray[np.float32]", inputs["temperature"])[:rows]
        self.entropy_bound = cast("npt.NDArray[np.float32]", inputs["entropy_bound"])[:rows]
        self.uniform = cast("npt.NDArray[np.float32]", inputs["uniform"])[:rows]
        self.noise_ids = cast("npt.NDArray[np.int32]", inputs["noise_ids"])[:rows]
        self.argmax_ids = cast("npt.NDArray[np.int32]", outputs["argmax_ids"])[:rows]
        self.accepted = cast("npt.NDArray[np.bool_]", outputs["accepted"])[:rows]
        self.entropy = cast("npt.NDArray[np.float32]", outputs["entropy"])[:rows]
        self.temperature.fill(1)
        self.entropy_bound.fill(0)

    @property
    def canvas_ids(self) -> npt.NDArray[np.int32]:
        """int32 [B, L]: the canvases that the next denoising step reads."""
        return cast("npt.NDArray[np.int32]", self.state.outputs.arrays[f"canvas_ids.{self.parity}"])[: self.rows]

    @property
    def self_conditioning(self) -> Array:
        """[B, L, H]: a copy of the self-conditioning that the next denoising step reads; bfloat16 becomes float32."""
        address = self.state.self_conditioning[self.parity]
        return download(self._device, address, self._dtype, (self.rows, *self.state.signal_shape[1:]))

    def _start_canvas(self, canvas_ids: npt.NDArray[np.int32], first: int) -> None:
        self.canvas_ids[first : first + len(canvas_ids)] = canvas_ids
        self._upload_canvases()
        # Zeros mean "no signal". The signal of zero logits (the mean embedding) would be something else.
        self._device.zero(self._signal(first), len(canvas_ids) * self._signal_row_bytes)

    def swap_rows(self, one: int, other: int) -> None:
        """Makes two rows change places, as :meth:`Batch.swap_rows` says."""
        scratch, scratch_bytes = self._scratch
        self.cache.swap_rows(one, other, scratch, scratch_bytes)
        self.canvas_ids[[one, other]] = self.canvas_ids[[other, one]]
        self._upload_canvases()
        # The copy that the next step writes holds nothing that is needed now.
        spare = self.state.self_conditioning[1 - self.parity]
        for target, source in (
            (spare, self._signal(one)),
            (self._signal(one), self._signal(other)),
            (self._signal(other), spare),
        ):
            self._device.copy(target, self._signal_row_bytes, source, self._signal_row_bytes, self._signal_row_bytes)

    def _upload_canvases(self) -> None:
        # All of them: what the host holds is what the last step wrote, and they are small.
        name = f"canvas_ids.{self.parity}"
        self.state.outputs.upload(name, name)

    @property
    def _signal_row_bytes(self) -> int:
        return self.state.signal_bytes // self.state.signal_shape[0]

    def _signal(self, row: int) -> int:
        """Address of the self-conditioning that the next step reads for a row."""
        return self.state.self_conditioning[self.parity] + row * self._signal_row_bytes


def shapes_of(sizes: Mapping[str, int], shape: Sequence[int | str]) -> tuple[int, ...]:
    """A shape with its symbols replaced by ``sizes``."""
    return tuple(sizes[axis] if isinstance(axis, str) else axis for axis in shape)
