"""The number formats that weights are stored in: what lies in the store, and how it is made and read back.

A format is one class here; recipes name it, and everything else asks :data:`FORMATS`. Weights are ``[.., N, K]``: N
output channels, K places that a product sums over. Dense weights ``[N, K]`` are laid out as ONNX has them, experts
``[E, N, K]`` as their kernels read them (``dgcompile.plugins.moe.formats``). torch is imported by what needs it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Literal, NamedTuple

from dgcompile.plugins.moe.formats import FP8_MAX, INT4_BLOCK, INT4_GROUPS, INT4_MAX

if TYPE_CHECKING:
    import torch
    from torch import Tensor

WeightFormat = Literal["fp32", "bf16", "fp8", "int8", "int4"]

SCALE = "_scale"
"""Suffix of the name that a weight's scales have in the store."""

DENSE_GROUPS = (32, 64, 128)
"""Group sizes of dense weights in INT4."""

EXPERT_GROUPS = INT4_GROUPS
"""Group sizes of experts in INT4: those of their kernels."""

EXPERT_BLOCK = INT4_BLOCK
"""What K of experts in INT4 must be a multiple of: the kernels' layout has blocks of so many places."""

CLIP_RATIOS = (1.0, 0.97, 0.94, 0.91, 0.88, 0.85, 0.82, 0.79, 0.76, 0.73, 0.70)
"""Scales that the search for the least squared error tries, as shares of the one that clips nothing: the steps are
small against how flat the error is around its least value."""

E4M3_TOPS = (448, 416, 384, 352, 320, 288, 256)
"""What a channel's largest magnitude may become: the numbers of the highest binade. Each gives a scale to try."""

_INT8_MAX = 127

_CHUNK = 1 << 18
"""Weights that the search works on at once: with its buffers they fit a core's second-level cache."""


class Part(NamedTuple):
    """One tensor in the store: dtype in safetensors' spelling, and shape."""

    dtype: str
    shape: tuple[int, ...]


class NumberFormat(ABC):
    """One format. A weight becomes parts, named by the suffix that they have in the store after the weight's name.

    Every part has the weight's leading axis first, so that a weight can be converted a slice at a time.
    """

    name: WeightFormat
    grouped = False

    @abstractmethod
    def parts(self, shape: tuple[int, ...], group_size: int, scale_dtype: str) -> dict[str, Part]:
        """The parts of a weight of ``shape``; ``scale_dtype`` ("F32", "BF16") is that of dense groups' scales."""

    @abstractmethod
    def bits(self, shape: tuple[int, ...], group_size: int, scale_bits: int) -> float:
        """Bits that a weight takes on average, scales included; ``scale_bits``: of dense groups' scales."""

    @abstractmethod
    def encode(self, weight: Tensor, group_size: int, scale_dtype: str) -> dict[str, Tensor]:
        """Parts of a weight or of a slice of its leading axis, finite and of any floating dtype.

        Raises:
            ValueError: a weight is too large for the format.
        """

    @abstractmethod
    def decode(self, parts: Mapping[str, Tensor], group_size: int) -> Tensor:
        """The float32 values of parts, in the weight's shape."""


class _Plain(NumberFormat):
    """Every weight as a floating-point number of its own."""

    def __init__(self, name: WeightFormat, dtype: str, bits: int) -> None:
        self.name, self._dtype, self._bits = name, dtype, bits

    def parts(self, shape: tuple[int, ...], group_size: int, scale_dtype: str) -> dict[str, Part]:
        return {"": Part(self._dtype, shape)}

    def bits(self, shape: tuple[int, ...], group_size: int, scale_bits: int) -> float:
        return self._bits

    def encode(self, weight: Tensor, group_size: int, scale_dtype: str) -> dict[str, Tensor]:
        rounded = weight.to(_torch_dtype(self._dtype))
        _refuse_overflow(rounded, self._dtype)
        return {"": rounded}

    def decode(self, parts: Mapping[str, Tensor], group_size: int) -> Tensor:
        return parts[""].float()


class _Fp8(NumberFormat):
    """E4M3 with one scale per output channel, chosen for the least squared error of the channel.

    Scales are float32 everywhere: they are few, and those of published checkpoints stay exact.
    """

    name: WeightFormat = "fp8"

    def parts(self, shape: tuple[int, ...], group_size: int, scale_dtype: str) -> dict[str, Part]:
        return {"": Part("F8_E4M3", shape), SCALE: Part("F32", shape[:-1])}

    def bits(self, shape: tuple[int, ...], group_size: int, scale_bits: int) -> float:
        return 8 + 32 / shape[-1]

    def encode(self, weight: Tensor, group_size: int, scale_dtype: str) -> dict[str, Tensor]:
        import torch

        rows = weight.reshape(-1, weight.shape[-1])
        codes, scales = torch.empty(rows.shape, dtype=torch.float8_e4m3fn), torch.empty(len(rows))

        def convert(_: int, where: slice) -> None:
            codes[where], scales[where] = _nearest_e4m3(rows[where].float())

        _in_parallel(convert, [(0, where) for where in _chunks(*rows.shape)])
        return {"": codes.view(weight.shape), SCALE: scales.view(weight.shape[:-1])}

    def decode(self, parts: Mapping[str, Tensor], group_size: int) -> Tensor:
        return parts[""].float().mul_(parts[SCALE][..., None])


class _Int8(NumberFormat):
    """Integers -127 to 127 with one scale per output channel. No kernel of the experts reads them.

    Where weights have no far outliers, a channel's 255 levels lie closer together than E4M3's numbers: about four times
    for the bulk of a normal distribution.
    """

    name: WeightFormat = "int8"

    def parts(self, shape: tuple[int, ...], group_size: int, scale_dtype: str) -> dict[str, Part]:
        return {"": Part("I8", shape), SCALE: Part("F32", shape[:-1])}

    def bits(self, shape: tuple[int, ...], group_size: int, scale_bits: int) -> float:
        return 8 + 32 / shape[-1]

    def encode(self, weight: Tensor, group_size: int, scale_dtype: str) -> dict[str, Tensor]:
        import torch

        scale = weight.abs().amax(dim=-1).float() / _INT8_MAX
        scale.masked_fill_(scale == 0, 1.0)
        codes = torch.div(weight.float(), scale[..., None]).round_().clamp_(-_INT8_MAX, _INT8_MAX)
        return {"": codes.to(torch.int8), SCALE: scale}

    def decode(self, parts: Mapping[str, Tensor], group_size: int) -> Tensor:
        return parts[""].float().mul_(parts[SCALE][..., None])


class _Int4(NumberFormat):
    """Integers -7 to 7 with one scale per group of places, chosen for the least squared error of the group."""

    name: WeightFormat = "int4"
    grouped = True

    def parts(self, shape: tuple[int, ...], group_size: int, scale_dtype: str) -> dict[str, Part]:
        *outer, rows, places = shape
        groups = -(-places // group_size)
        if outer:
            blocks = -(-places // INT4_BLOCK)
            codes, scales = (*outer, blocks, rows, INT4_BLOCK // 2), (*outer, groups, rows)
        else:
            codes, scales = (rows, places // 2), (rows, groups)
        return {"": Part("U8", codes), SCALE: Part(_scale_dtype(shape, "F16", scale_dtype), scales)}

    def bits(self, shape: tuple[int, ...], group_size: int, scale_bits: int) -> float:
        return 4 + (16 if _are_experts(shape) else scale_bits) / group_size

    def encode(self, weight: Tensor, group_size: int, scale_dtype: str) -> dict[str, Tensor]:
        import torch

        shape = tuple(weight.shape)
        made = self.parts(shape, group_size, scale_dtype)
        codes = torch.zeros(made[""].shape, dtype=torch.uint8)
        scales = torch.empty(made[SCALE].shape, dtype=_torch_dtype(made[SCALE].dtype))
        experts = _are_experts(shape)

        def convert(index: int, rows: slice) -> None:
            matrix = weight[index] if experts else weight  # [N, K]
            grouped = matrix[rows].reshape(-1, matrix.shape[1] // group_size, group_size)
            # Places of a group first and groups last: every step below runs over long rows of memory.
            grouped = grouped.permute(2, 0, 1).float().contiguous()  # [g, n, G]
            quantized, scale = _least_squares(grouped, scales.dtype)
            if experts:
                codes[index, :, rows] = _pack_blocks(quantized).permute(2, 1, 0)
                scales[index, :, rows] = scale.t()
            else:
                codes[rows] = _pack_pairs(quantized).permute(1, 2, 0).flatten(1)
                scales[rows] = scale

        if experts:
            _refuse_tiny(weight)
        slices = _chunks(*shape[-2:])
        _in_parallel(convert, [(index, rows) for index in range(shape[0] if experts else 1) for rows in slices])
        return {"": codes, SCALE: scales}

    def decode(self, parts: Mapping[str, Tensor], group_size: int) -> Tensor:
        codes, scale = parts[""], parts[SCALE].float()
        if codes.ndim == 4:
            values, scale = _unpack_blocks(codes), scale.transpose(-1, -2)  # [E, N, K] and [E, N, G]
            values = values[..., : scale.shape[-1] * group_size]
        else:
            values = _unpack_pairs(codes)
        grouped = values.view(*values.shape[:-1], -1, group_size)
        return grouped.mul_(scale[..., None]).flatten(-2)


FORMATS: dict[WeightFormat, NumberFormat] = {
    known.name: known for known in (_Plain("fp32", "F32", 32), _Plain("bf16", "BF16", 16), _Fp8(), _Int8(), _Int4())
}
"""Every format by its name."""


def _refuse_tiny(experts: Tensor) -> None:
    """Refuses experts whose scales would be float16 numbers of four bits or less; one of zeros is no such thing."""
    largest = experts.abs().amax(dim=(1, 2)).float()
    if bool(((largest > 0) & (largest / INT4_MAX < 2.0**-20)).any()):
        smallest = float(largest[largest > 0].min())
        raise ValueError(f"an expert's largest weight is {smallest:.3g}, too small for INT4 scales in float16")


def _chunks(rows: int, places: int) -> list[slice]:
    """Rows [N, K] in pieces that a core's cache holds."""
    at_once = max(1, _CHUNK // places)
    return [slice(first, first + at_once) for first in range(0, rows, at_once)]


def _in_parallel(work: Callable[[int, slice], None], tasks: list[tuple[int, slice]]) -> None:
    """Does tasks that do not touch each other's results, each on one thread: torch's own threads would wait for one
    another after every step of a task, which beside other processes takes longer than the step."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(lambda task: work(*task), tasks):
                pass
    finally:
        torch.set_num_threads(threads)


def _nearest_e4m3(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [N, K] and float32 scales [N] of float32 rows [N, K]. A row of zeros gets scale 1."""
    import torch

    largest = rows.abs().amax(dim=-1)
    scaled, split = torch.empty_like(rows), torch.empty_like(rows)
    best_error = torch.full_like(largest, torch.inf)
    # Where squares overflow or underflow nothing is better than this.
    best_scale = torch.where(largest > 0, largest / E4M3_TOPS[0], torch.ones_like(largest))
    best_scale.masked_fill_(best_scale == 0, 1.0)
    for top in E4M3_TOPS:
        scale = largest / top
        scale.masked_fill_(scale == 0, 1.0)
        torch.div(rows, scale[:, None], out=scaled)
        # Veltkamp's splitting: what is left of a float32 are its four leading bits, E4M3's significand (subnormals,
        # below 2**-14 of the largest, hardly count here).
        torch.mul(scaled, 2.0**20 + 1, out=split)
        torch.sub(split, scaled, out=scaled)
        split.sub_(scaled).mul_(scale[:, None]).sub_(rows).square_()
        error = split.sum(dim=-1)
        better = error < best_error
        torch.where(better, error, best_error, out=best_error)
        torch.where(better, scale, best_scale, out=best_scale)
    return _to_e4m3(rows, best_scale), best_scale


def _to_e4m3(rows: Tensor, scale: Tensor) -> Tensor:
    import torch

    # A scale that was rounded down puts the largest magnitude beyond 448, which torch would make NaN.
    return torch.div(rows, scale[:, None]).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def _least_squares(grouped: Tensor, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes -7..7 as float32 [g, n, G] and scales [n, G] of float32 weights [g, n, G].

    Of the scales that :data:`CLIP_RATIOS` names, the one with the least squared error of its group; codes are chosen
    for the scale as it is stored, so they make up for its rounding. A group of zeros gets scale 1.
    """
    import torch

    largest = grouped.abs().amax(dim=0)  # [n, G]
    if float(largest.max()) / INT4_MAX > torch.finfo(scale_dtype).max:
        raise ValueError(f"weights up to {float(largest.max()):.3g} are too large for INT4 scales in {scale_dtype}")
    work = torch.empty_like(grouped)
    best_error = torch.full_like(largest, torch.inf)
    best_scale = (largest / INT4_MAX).to(scale_dtype).float()  # where squares overflow nothing is better
    best_scale.masked_fill_(best_scale == 0, 1.0)
    for ratio in CLIP_RATIOS:
        scale = (largest * (ratio / INT4_MAX)).to(scale_dtype).float()
        scale.masked_fill_(scale == 0, 1.0)
        torch.div(grouped, scale, out=work)
        work.round_().clamp_(-INT4_MAX, INT4_MAX).mul_(scale).sub_(grouped).square_()
        error = work.sum(dim=0)
        better = error < best_error
        torch.where(better, error, best_error, out=best_error)
        torch.where(better, scale, best_scale, out=best_scale)
    codes = torch.div(grouped, best_scale, out=work).round_().clamp_(-INT4_MAX, INT4_MAX)
    return codes, best_scale.to(scale_dtype)


def _pack_pairs(codes: Tensor) -> Tensor:
    """Codes [g, n, G] -> bytes [g / 2, n, G] of two neighbours in two's complement, the first in the low nibble."""
    import torch

    nibbles = codes.to(torch.int8).view(torch.uint8).bitwise_and_(15)
    return nibbles[0::2] | (nibbles[1::2] << 4)


def _unpack_pairs(packed: Tensor) -> Tensor:
    """Bytes [N, K / 2] -> float32 codes [N, K]."""
    import torch

    low, high = packed & 15, packed >> 4
    nibbles = torch.stack([low, high], dim=-1).flatten(-2)
    return ((nibbles ^ 8).to(torch.int8) - 8).float()


def _pack_blocks(codes: Tensor) -> Tensor:
    """Codes [g, n, G] -> bytes [32, n, ceil(K / 64)] of places 32 apart, in sign and magnitude."""
    import torch

    half = INT4_BLOCK // 2
    nibbles = codes.abs().to(torch.uint8) | ((codes < 0).to(torch.uint8) << 3)
    # [g, n, G] as [32, n, halves of blocks]: groups of 64 are two halves one after the other.
    halves = nibbles.reshape(-1, half, *nibbles.shape[1:]).permute(1, 2, 3, 0).flatten(2)
    if halves.shape[2] % 2:
        halves = torch.nn.functional.pad(halves, (0, 1))
    return halves[..., 0::2] | (halves[..., 1::2] << 4)


def _unpack_blocks(packed: Tensor) -> Tensor:
    """Bytes [E, blocks, N, 32] -> float32 codes [E, N, blocks * 64]."""
    nibbles = packed.new_empty((*packed.shape[:-1], 2, packed.shape[-1]))
    nibbles[..., 0, :], nibbles[..., 1, :] = packed & 15, packed >> 4
    magnitude = (nibbles & 7).float()
    signed = magnitude.mul_(1.0 - 2.0 * (nibbles >> 3).float())
    return signed.flatten(-2).transpose(1, 2).flatten(-2)


def _scale_dtype(shape: tuple[int, ...], experts: str, dense: str) -> str:
    """Experts' kernels fix the dtype of their scales; dense ones are multiplied in the dtype of the activations."""
    return experts if _are_experts(shape) else dense


def _are_experts(shape: tuple[int, ...]) -> bool:
    return len(shape) == 3


def _refuse_overflow(rounded: Tensor, dtype: str) -> None:
    if not bool(rounded.isfinite().all()):
        raise ValueError(f"a weight is too large for {_torch_dtype(dtype)}")


def _torch_dtype(dtype: str) -> torch.dtype:
    """torch's dtype of one in safetensors' spelling."""
    import torch

    names = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "U8": torch.uint8}
    return {**names, "F8_E4M3": torch.float8_e4m3fn}[dtype]
