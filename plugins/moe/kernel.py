"""MixtureOfExperts in the Triton language: grouped products over tiles of tokens that share an expert.

The steps are :func:`~dgcompile.plugins.moe.routing.route_kernel`, :func:`gate_up_kernel`, :func:`down_kernel` and
:func:`combine_kernel`; ``w4a8`` has :func:`round_rows_kernel` before each product. A pair is the number
``token * top_k + choice``; what is computed for a pair lies in its row of a buffer, so nothing is sorted back.

Both products are computed transposed, weight rows x tokens: an expert sees 16 tokens on average, and the tensor core's
long side (64 rows on SM90) is filled by weight rows instead of by tokens that are not there. It also lets unpacked
weights go from registers straight into the tensor core.

Sizes of the model are compile-time constants, the number of tokens is not.
"""

# The compiler leaves out the branch that a constant condition does not take, but not what follows it: hence each else.
# ruff: noqa: RET505

from __future__ import annotations

import triton
import triton.language as tl

from dgcompile.plugins.moe.formats import FORMAT_CODES

# Formats as the kernels see them; "w4a8" is INT4 with FP8 activations.
FP8 = tl.constexpr(FORMAT_CODES["fp8"])
INT4 = tl.constexpr(FORMAT_CODES["int4"])


@triton.jit
def _gelu_tanh(x):
    """GELU in its tanh approximation; ``(1 + tanh y) / 2`` is ``sigmoid(2 y)``, which needs one exponential."""
    return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))


@triton.jit
def _to_e4m3(x):
    """fp32, magnitude at most 448, to E4M3, ties to even.

    The value is rounded by hand first, to 3 bits of mantissa, or to multiples of 2**-9 where E4M3 is subnormal: then
    the conversion is exact. Hardware would round alike, but the interpreter loses the carry into the exponent.
    """
    bits = x.to(tl.uint32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & 0xFFF00000
    normal = bits.to(tl.float32, bitcast=True)
    small = (x + 24576.0) - 24576.0  # 1.5 * 2**14: an fp32 there has 2**-9 as its last place
    return tl.where(tl.abs(x) < 0.015625, small, normal).to(tl.float8e4nv)


@triton.jit
def _int4_half(packed, HIGH: tl.constexpr, dtype: tl.constexpr):
    """One nibble of each byte as a number of dtype, in units of :func:`_int4_unit`."""
    sign = (packed & 0x80) if HIGH else ((packed & 8) << 4)
    magnitude = ((packed >> 4) & 7) if HIGH else (packed & 7)
    if dtype == tl.float8e4nv:
        return (sign | magnitude).to(tl.float8e4nv, bitcast=True)
    elif dtype == tl.float16:
        # Subnormal fp16 numbers are linear in their bits, and tensor cores take them as they are.
        return ((sign.to(tl.uint16) << 8) | magnitude.to(tl.uint16)).to(tl.float16, bitcast=True)
    elif dtype == tl.bfloat16:
        # Products with subnormal bf16 numbers would underflow in fp32. 0x4300 is 128, whose last place is 1.
        shifted = (magnitude.to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True) - 128.0
        return (shifted.to(tl.bfloat16).to(tl.uint16, bitcast=True) | (sign.to(tl.uint16) << 8)).to(
            tl.bfloat16, bitcast=True
        )
    else:
        value = magnitude.to(tl.float32)
        return tl.where(sign > 0, -value, value)


@triton.jit
def _int4_unit(dtype: tl.constexpr):
    """What 1 in a number from :func:`_int4_half` must be multiplied by."""
    if dtype == tl.float8e4nv:
        return 512.0
    elif dtype == tl.float16:
        return 16777216.0
    else:
        return 1.0


@triton.jit
def _multiply_int4(
    acc,
    packed,
    scales,
    row,
    row_inside,
    block,
    x_low,
    x_high,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """acc [BLOCK_N, BLOCK_M] + weight rows of one block of 64 times the two halves of x, [32, BLOCK_M] each.

    Codes go into the tensor core as they are and the scale is applied to the sums of a group, in fp32: no weight is
    rounded a second time, and with 16 tokens there are fewer sums than weights.
    """
    byte = tl.arange(0, 32)
    place = packed + (block * ROWS + row[:, None]) * 32 + byte[None, :]
    weight = tl.load(place, mask=row_inside[:, None], other=0)
    unit = _int4_unit(x_low.dtype)
    low = _int4_half(weight, False, x_low.dtype)
    high = _int4_half(weight, True, x_high.dtype)
    if GROUP == 64:
        scale = tl.load(scales + block * ROWS + row, mask=row_inside, other=0.0).to(tl.float32) * unit
        sums = tl.dot(low, x_low, input_precision="ieee")
        sums = tl.dot(high, x_high, sums, input_precision="ieee")
        acc += sums * scale[:, None]
    else:
        place = scales + 2 * block * ROWS + row
        scale_low = tl.load(place, mask=row_inside, other=0.0).to(tl.float32) * unit
        # The last block may have one group only.
        scale_high = tl.load(place + ROWS, mask=row_inside & (block * 64 + 32 < K), other=0.0).to(tl.float32) * unit
        acc += tl.dot(low, x_low, input_precision="ieee") * scale_low[:, None]
        acc += tl.dot(high, x_high, input_precision="ieee") * scale_high[:, None]
    return acc


@triton.jit
def _multiply(acc, weights, row, row_inside, k, x, K: tl.constexpr, STEP: tl.constexpr):
    """acc [BLOCK_N, BLOCK_M] + weight rows [BLOCK_N, BLOCK_K] at columns k times x [BLOCK_K, BLOCK_M]."""
    place = weights + row[:, None] * K + k[None, :]
    if K % STEP == 0:
        weight = tl.load(place, mask=row_inside[:, None], other=0.0)
    else:
        weight = tl.load(place, mask=row_inside[:, None] & (k < K)[None, :], other=0.0)
    return tl.dot(weight.to(x.dtype), x, acc, input_precision="ieee")


@triton.jit
def _activations(x, row, row_inside, k, K: tl.constexpr, STEP: tl.constexpr):
    """Rows of x [.., K] at columns k, transposed: [k, row]. Masks the last STEP columns only where they do not fit."""
    place = x + row[None, :] * K + k[:, None]
    if K % STEP == 0:
        return tl.load(place, mask=row_inside[None, :], other=0.0)
    else:
        return tl.load(place, mask=row_inside[None, :] & (k < K)[:, None], other=0.0)


@triton.jit
def _expert_weights(
    weights, scales, expert, N: tl.constexpr, K: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr
):
    """Pointers to one expert's weights and scales. 64 bits: 128 experts can have more elements than 32 bits count."""
    wide = expert.to(tl.int64)
    if FORMAT == INT4:
        return weights + wide * (((K + 63) // 64) * N * 32), scales + wide * (((K + GROUP - 1) // GROUP) * N)
    else:
        return weights + wide * (N * K), scales + wide * N


@triton.jit
def gate_up_kernel(
    hidden,
    hidden_scale,
    gate_up,
    scales,
    tile_pairs,
    tile_expert,
    tile_count,
    inner,
    pairs,
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """inner[pair] = gelu(gate x) * (up x) for one tile of pairs and BLOCK_N columns.

    Args:
        hidden: [T, HIDDEN]. E4M3 for w4a8.
        hidden_scale: fp32 [T], of E4M3 hidden states; else unused.
        gate_up: [E, 2 INNER, HIDDEN] in FORMAT, gate rows first.
        scales: of the weights, as FORMAT has them.
        tile_pairs, tile_expert, tile_count: from the routing.
        inner: [pairs, INNER], out.
        pairs: T * TOP_K.

    Tiles are the fast axis of the grid: an expert's second tile runs beside its first and finds the weights in L2.
    """
    tile = tl.program_id(0)
    if tile >= tl.load(tile_count):
        return
    expert = tl.load(tile_expert + tile)
    pair = tl.load(tile_pairs + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    used = pair < pairs
    token = pair // TOP_K
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < INNER
    weights, scale = _expert_weights(gate_up, scales, expert, 2 * INNER, HIDDEN, FORMAT, GROUP)

    gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if FORMAT == INT4:
        half = tl.arange(0, 32)
        for block in range((HIDDEN + 63) // 64):
            low = _activations(hidden, token, used, block * 64 + half, HIDDEN, 64)
            high = _activations(hidden, token, used, block * 64 + 32 + half, HIDDEN, 64)
            gate = _multiply_int4(gate, weights, scale, column, inside, block, low, high, 2 * INNER, HIDDEN, GROUP)
            up = _multiply_int4(up, weights, scale, column + INNER, inside, block, low, high, 2 * INNER, HIDDEN, GROUP)
    else:
        for start in range(0, HIDDEN, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            x = _activations(hidden, token, used, k, HIDDEN, BLOCK_K)
            gate = _multiply(gate, weights, column, inside, k, x, HIDDEN, BLOCK_K)
            up = _multiply(up, weights, column + INNER, inside, k, x, HIDDEN, BLOCK_K)
        if FORMAT == FP8:
            gate *= tl.load(scale + column, mask=inside, other=0.0)[:, None]
            up *= tl.load(scale + INNER + column, mask=inside, other=0.0)[:, None]
    if hidden.dtype.element_ty == tl.float8e4nv:
        x_scale = tl.load(hidden_scale + token, mask=used, other=0.0)
        gate *= x_scale[None, :]
        up *= x_scale[None, :]
    result = _gelu_tanh(gate) * up
    place = inner + pair[None, :] * INNER + column[:, None]
    tl.store(place, result.to(inner.dtype.element_ty), mask=used[None, :] & inside[:, None])


@triton.jit
def down_kernel(
    inner,
    inner_scale,
    down,
    scales,
    tile_pairs,
    tile_expert,
    tile_count,
    outer,
    pairs,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """outer[pair] = down inner[pair] for one tile of pairs and BLOCK_N columns.

    Args:
        inner: [pairs, INNER]. E4M3 for w4a8.
        inner_scale: fp32 [pairs], of E4M3 rows; else unused.
        down: [E, HIDDEN, INNER] in FORMAT.
        scales: of the weights, as FORMAT has them.
        tile_pairs, tile_expert, tile_count: from the routing.
        outer: [pairs, HIDDEN], out, not yet weighted.
        pairs: T * top_k.
    """
    tile = tl.program_id(0)
    if tile >= tl.load(tile_count):
        return
    expert = tl.load(tile_expert + tile)
    pair = tl.load(tile_pairs + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    used = pair < pairs
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < HIDDEN
    weights, scale = _expert_weights(down, scales, expert, HIDDEN, INNER, FORMAT, GROUP)

    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if FORMAT == INT4:
        half = tl.arange(0, 32)
        for block in range((INNER + 63) // 64):
            low = _activations(inner, pair, used, block * 64 + half, INNER, 64)
            high = _activations(inner, pair, used, block * 64 + 32 + half, INNER, 64)
            acc = _multiply_int4(acc, weights, scale, column, inside, block, low, high, HIDDEN, INNER, GROUP)
    else:
        for start in range(0, INNER, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            x = _activations(inner, pair, used, k, INNER, BLOCK_K)
            acc = _multiply(acc, weights, column, inside, k, x, INNER, BLOCK_K)
        if FORMAT == FP8:
            acc *= tl.load(scale + column, mask=inside, other=0.0)[:, None]
    if inner.dtype.element_ty == tl.float8e4nv:
        acc *= tl.load(inner_scale + pair, mask=used, other=0.0)[None, :]
    place = outer + pair[None, :] * HIDDEN + column[:, None]
    tl.store(place, acc.to(outer.dtype.element_ty), mask=used[None, :] & inside[:, None])


@triton.jit
def combine_kernel(outer, expert_weights, output, TOP_K: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    """output[t] = sum over k of expert_weights[t, k] * outer[t, k], summed in fp32, k ascending.

    Args:
        outer: [T, TOP_K, HIDDEN].
        expert_weights: [T, TOP_K].
        output: [T, HIDDEN], out.
    """
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < HIDDEN
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(TOP_K):
        pair = token * TOP_K + choice
        weight = tl.load(expert_weights + pair).to(tl.float32)
        total += weight * tl.load(outer + pair * HIDDEN + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + token * HIDDEN + column, total.to(output.dtype.element_ty), mask=inside)


@triton.jit
def round_rows_kernel(rows, codes, scales, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Rows in E4M3 with a scale of their own: program r does row r.

    Args:
        rows: [R, WIDTH].
        codes: E4M3 [R, WIDTH], out.
        scales: fp32 [R], out: largest magnitude / 448, or 1 for a row of zeros (the self-conditioning signal is zero
            on the first step).
        BLOCK: power of two, at least WIDTH.
    """
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    x = tl.load(rows + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(x), 0)
    scale = tl.where(largest > 0, largest / 448.0, 1.0)
    # A subnormal scale may be rounded down by so much that the quotient passes 448.
    quotient = tl.minimum(tl.maximum(x / scale, -448.0), 448.0)
    tl.store(codes + row * WIDTH + column, _to_e4m3(quotient), mask=inside)
    tl.store(scales + row, scale)
