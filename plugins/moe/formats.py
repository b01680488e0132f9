"""Number formats of expert weights: what the bytes mean, as packing and unpacking in numpy.

``float``
    Weights [.., N, K] as they are, in the dtype of the activations.
``fp8``
    E4M3 codes, uint8 [.., N, K], and one float32 scale per output channel, [.., N]: ``weight = value(code) * scale``.
``int4``
    Integers -7..7 in blocks of 64 along the reduction axis K, uint8 [.., ceil(K / 64), N, 32], and one scale per group
    of 32 or 64 along K, [.., ceil(K / group), N]: ``weight = code * scale``.
``w4a8``
    Bytes as in ``int4``; the difference is in the arithmetic, which takes the activations in E4M3 too.

A nibble of ``int4`` is sign (bit 3) and magnitude (bits 0 to 2), not two's complement: the same bits, with the sign
moved to bit 7, are the E4M3 number ``code * 2**-9``, because E4M3 is linear below 2**-6. So FP8 tensor cores take
the codes after two bit operations, without any conversion. -0 (binary 1000) is never written and reads as 0.

Byte j of a block holds the codes of two places 32 apart: j in the low nibble, j + 32 in the high one. A kernel that
multiplies the halves one after the other never has to interleave them. The block is the outer axis, so that the tile
which a program reads in one step, all its rows of one block, lies in one piece. K is filled up with zeros to whole
blocks.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.floating]
WeightFormat = Literal["float", "fp8", "int4", "w4a8"]

WEIGHT_FORMATS: tuple[WeightFormat, ...] = get_args(WeightFormat)
FORMAT_CODES: dict[WeightFormat, int] = {"float": 0, "fp8": 1, "int4": 2, "w4a8": 2}
"""How kernels are told the format of the bytes."""

FP8_MAX = 448.0
INT4_MAX = 7
INT4_BLOCK = 64  # places along the reduction axis whose codes lie together
INT4_GROUPS = (32, 64)


def _e4m3_values() -> npt.NDArray[np.float32]:
    """Value of each E4M3 code, [256]: bias 7, no infinities, 0x7F and 0xFF are NaN."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    magnitude = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    magnitude[code & 127 == 127] = np.nan
    return np.where(code & 128, -magnitude, magnitude).astype(np.float32)


E4M3_VALUES = _e4m3_values()


def fp8_decode(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Values of E4M3 codes."""
    return E4M3_VALUES[codes]


def fp8_encode(values: FloatArray) -> npt.NDArray[np.uint8]:
    """Nearest E4M3 codes, ties to even, larger magnitudes than 448 become 448."""
    finite = E4M3_VALUES[:127].astype(np.float64)  # 0 .. 448, ascending
    magnitude = np.minimum(np.abs(values.astype(np.float64)), FP8_MAX)
    above = np.clip(np.searchsorted(finite, magnitude), 1, 126)
    below = above - 1
    middle = (finite[below] + finite[above]) / 2
    up = (magnitude > middle) | ((magnitude == middle) & (above % 2 == 0))
    code = np.where(up, above, below).astype(np.uint8)
    return np.where(np.signbit(values), code | 128, code).astype(np.uint8)


def fp8_quantize(weight: FloatArray) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]:
    """Weights [.., N, K] -> E4M3 codes [.., N, K] and scales [.., N]. A row of zeros gets scale 1."""
    scale = fp8_scale(weight)
    return fp8_encode(weight.astype(np.float64) / scale[..., None]), scale


def fp8_dequantize(codes: npt.NDArray[np.uint8], scale: FloatArray) -> npt.NDArray[np.float64]:
    """Weights [.., N, K] of codes [.., N, K] and scales [.., N]."""
    return fp8_decode(codes).astype(np.float64) * scale.astype(np.float64)[..., None]


def fp8_scale(rows: FloatArray) -> npt.NDArray[np.float32]:
    """Scale that brings the largest magnitude of each row [.., K] to 448, [..]; 1 for a row of zeros."""
    largest = np.abs(rows).max(axis=-1).astype(np.float32)
    return np.where(largest > 0, largest / np.float32(FP8_MAX), np.float32(1)).astype(np.float32)


def fp8_round_rows(rows: FloatArray) -> npt.NDArray[np.float64]:
    """What is left of activations [.., K] in E4M3 with one scale per row: how ``w4a8`` sees them."""
    scale = fp8_scale(rows)
    return fp8_dequantize(fp8_encode(rows.astype(np.float64) / scale[..., None]), scale)


def int4_pack(codes: npt.NDArray[np.integer]) -> npt.NDArray[np.uint8]:
    """Codes [.., N, K], each -7..7 -> bytes [.., ceil(K / 64), N, 32].

    Raises:
        ValueError: a code out of range.
    """
    if codes.size and np.abs(codes.astype(np.int64)).max() > INT4_MAX:
        raise ValueError(f"INT4 codes must be -7 to 7, found {codes.min()} to {codes.max()}")
    *outer, rows, places = codes.shape
    blocks = -(-places // INT4_BLOCK)
    nibbles = np.abs(codes).astype(np.uint8) | np.where(codes < 0, 8, 0).astype(np.uint8)
    filled = np.zeros((*outer, rows, blocks * INT4_BLOCK), np.uint8)
    filled[..., :places] = nibbles
    halves = filled.reshape(*outer, rows, blocks, 2, INT4_BLOCK // 2)
    packed = halves[..., 0, :] | (halves[..., 1, :] << 4)  # [.., N, blocks, 32]
    return np.ascontiguousarray(np.swapaxes(packed, -2, -3))


def int4_unpack(packed: npt.NDArray[np.uint8], places: int) -> npt.NDArray[np.int8]:
    """Bytes [.., ceil(K / 64), N, 32] -> codes [.., N, K], with K = ``places``."""
    by_row = np.swapaxes(packed, -2, -3)
    nibbles = np.stack([by_row & 15, by_row >> 4], axis=-2)  # [.., N, blocks, 2, 32]
    nibbles = nibbles.reshape(*by_row.shape[:-2], -1)[..., :places].astype(np.int8)
    magnitude = nibbles & 7
    return np.where(nibbles & 8, -magnitude, magnitude).astype(np.int8)


def int4_quantize(
    weight: FloatArray, group: int, scale_dtype: npt.DTypeLike = np.float16
) -> tuple[npt.NDArray[np.uint8], FloatArray]:
    """Weights [.., N, K] -> bytes [.., ceil(K / 64), N, 32] and scales [.., ceil(K / group), N], rounding to nearest.

    The scale is rounded to its dtype before the codes are chosen, so that they make up for its rounding. Where it
    rounds to zero (a group of zeros) it is 1.
    """
    if group not in INT4_GROUPS:
        raise ValueError(f"INT4 groups hold 32 or 64 weights, not {group}")
    *outer, rows, places = weight.shape
    groups = -(-places // group)
    filled = np.zeros((*outer, rows, groups * group))
    filled[..., :places] = weight
    grouped = filled.reshape(*outer, rows, groups, group)
    scale = (np.abs(grouped).max(axis=-1) / INT4_MAX).astype(scale_dtype)  # [.., N, groups]
    scale = np.where(scale == 0, np.ones_like(scale), scale)
    codes = np.clip(np.rint(grouped / scale.astype(np.float64)[..., None]), -INT4_MAX, INT4_MAX).astype(np.int8)
    packed = int4_pack(codes.reshape(*outer, rows, groups * group)[..., :places])
    return packed, np.ascontiguousarray(np.swapaxes(scale, -1, -2))


def int4_dequantize(
    packed: npt.NDArray[np.uint8], scale: FloatArray, places: int, group: int
) -> npt.NDArray[np.float64]:
    """Weights [.., N, K] of bytes [.., ceil(K / 64), N, 32] and scales [.., ceil(K / group), N]; K = ``places``."""
    codes = int4_unpack(packed, places)
    per_place = np.repeat(np.swapaxes(scale, -1, -2).astype(np.float64), group, axis=-1)[..., :places]
    return codes * per_place
