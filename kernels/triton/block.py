"""Device functions: whole blocks of 16 elements, quantised as `minite` says (kernels/README.md).

A tensor of shape [ROWS, BLOCKS] holds one number for each block, so that a thread has the elements of a block in
registers: eight words of BF16 pairs, or sixteen of FP32 numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.codec import (
    INFINITY_BITS,
    ZERO_GROUP_BELOW,
    bf16_high,
    bf16_low,
    both_halves,
    e4m3_encode,
    e4m3_to_f16,
    e4m3_to_f32,
    encode_magnitudes,
    larger_bf16,
    magnitudes_to_f16,
    multiply_f16,
    scale_bf16,
    signs_of_bf16,
)


@triton.jit
def load_four(start, mask, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """int32 pointers [ROWS, BLOCKS] to the first of four words -> the four words, each uint32 [ROWS, BLOCKS]."""
    found = tl.load(start[:, :, None] + tl.arange(0, 4)[None, None, :], mask=mask[:, :, None], other=0)
    pairs = tl.reshape(found.to(tl.uint32, bitcast=True), (ROWS, BLOCKS, 2, 2))
    even, odd = tl.split(pairs)
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3


@triton.jit
def largest_of_four_f32(w0, w1, w2, w3):
    """Words of FP32 numbers -> the bits (int32) of the largest magnitude; NaN is larger than infinity."""
    low = tl.maximum(w0 & 0x7FFFFFFF, w1 & 0x7FFFFFFF)
    return tl.maximum(low, tl.maximum(w2 & 0x7FFFFFFF, w3 & 0x7FFFFFFF)).to(tl.int32, bitcast=True)


@triton.jit
def outer_scale(amax_bits):
    """FP32 bits (int32) of A of any shape -> (g, whether A is finite). g is NaN where it is not."""
    finite = amax_bits < INFINITY_BITS
    amax = tl.where(finite, amax_bits, 0).to(tl.float32, bitcast=True)
    g = tl.div_rn(amax, tl.full(amax.shape, 2688.0, tl.float32))
    g = tl.where(amax < ZERO_GROUP_BELOW, 1.0, g)
    return tl.where(finite, g, float("nan")), finite


@triton.jit
def block_scale(block_bits, g, finite):
    """FP32 bits (int32) of a, and g, both [ROWS, BLOCKS] -> E4M3 byte (uint32); 0 in groups that are not finite."""
    largest = tl.where(finite, block_bits, 0).to(tl.float32, bitcast=True)
    divisor = tl.where(finite, g * 6.0, 1.0)
    return e4m3_encode(tl.div_rn(largest, divisor))


@triton.jit
def element_divisor(scale, g):
    """E4M3 byte and g -> (power, divisor, reciprocal): x is divided by divisor / power, and divisor is in
    [1, 2). That quotient is x where the scale is 0."""
    step = tl.where(scale == 0, 1.0, e4m3_to_f32(scale) * g)
    bits = step.to(tl.uint32, bitcast=True)
    power = ((254 << 23) - (bits & 0x7F800000)).to(tl.float32, bitcast=True)
    divisor = ((bits & 0x007FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
    return power, divisor, tl.div_rn(tl.full(divisor.shape, 1.0, tl.float32), divisor)


@triton.jit
def encode_bf16(w0, w1, w2, w3, power, divisor, reciprocal):
    """Four words of BF16 pairs -> a word of their codes."""
    a0 = scale_bf16(w0 & 0x7FFF7FFF, power)
    a1 = scale_bf16(w1 & 0x7FFF7FFF, power)
    a2 = scale_bf16(w2 & 0x7FFF7FFF, power)
    a3 = scale_bf16(w3 & 0x7FFF7FFF, power)
    codes = encode_magnitudes(
        bf16_low(a0),
        bf16_high(a0),
        bf16_low(a1),
        bf16_high(a1),
        bf16_low(a2),
        bf16_high(a2),
        bf16_low(a3),
        bf16_high(a3),
        divisor,
        reciprocal,
        False,
    )
    return codes | signs_of_bf16(w0, w1, w2, w3)


@triton.jit
def encode_f32(w0, w1, w2, w3, w4, w5, w6, w7, power, divisor, reciprocal):
    """Eight words of FP32 numbers -> a word of their codes."""
    codes = encode_magnitudes(
        _magnitude(w0) * power,
        _magnitude(w1) * power,
        _magnitude(w2) * power,
        _magnitude(w3) * power,
        _magnitude(w4) * power,
        _magnitude(w5) * power,
        _magnitude(w6) * power,
        _magnitude(w7) * power,
        divisor,
        reciprocal,
        True,
    )
    low = _sign(w0, 28) | _sign(w1, 24) | _sign(w2, 20) | _sign(w3, 16)
    return codes | low | _sign(w4, 12) | _sign(w5, 8) | _sign(w6, 4) | (w7 & 0x80000000)


@triton.jit
def _magnitude(word):
    return (word & 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _sign(word, SHIFT: tl.constexpr):
    return (word & 0x80000000) >> SHIFT


@triton.jit
def codes_of_bf16(w0, w1, w2, w3, w4, w5, w6, w7, scale, g):
    """The words of blocks of BF16 pairs, their E4M3 bytes and g -> the two words of their codes."""
    power, divisor, reciprocal = element_divisor(scale, g)
    c0 = encode_bf16(w0, w1, w2, w3, power, divisor, reciprocal)
    c1 = encode_bf16(w4, w5, w6, w7, power, divisor, reciprocal)
    return tl.where(scale == 0, 0, c0), tl.where(scale == 0, 0, c1)


@triton.jit
def decoded_words(c0, c1, scale, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """The code words and E4M3 bytes of blocks -> their f16 values, int32 [ROWS, 8 BLOCKS], in the order of memory."""
    d0, d1, d2, d3 = decode_word(c0, scale)
    d4, d5, d6, d7 = decode_word(c1, scale)
    return join_words(d0, d1, d2, d3, d4, d5, d6, d7, ROWS, BLOCKS)


@triton.jit
def largest_of_block_bf16(w0, w1, w2, w3, w4, w5, w6, w7):
    """The words of blocks of BF16 pairs -> FP32 bits (int32) of their largest magnitudes; NaN is the largest."""
    low = larger_bf16(larger_bf16(w0, w1), larger_bf16(w2, w3))
    pair = larger_bf16(low, larger_bf16(larger_bf16(w4, w5), larger_bf16(w6, w7)))
    return tl.maximum((pair << 16) & 0x7FFF0000, pair & 0x7FFF0000).to(tl.int32, bitcast=True)


@triton.jit
def decode_word(codes, scale):
    """A word of eight codes and their block's E4M3 byte -> four words of f16 code times scale, exact."""
    factor = both_halves(e4m3_to_f16(scale).to(tl.uint16, bitcast=True).to(tl.uint32))
    w0, w1, w2, w3 = magnitudes_to_f16(codes)
    w0 = multiply_f16(w0, factor) | ((codes << 12) & 0x8000) | ((codes << 24) & 0x80000000)
    w1 = multiply_f16(w1, factor) | ((codes << 4) & 0x8000) | ((codes << 16) & 0x80000000)
    w2 = multiply_f16(w2, factor) | ((codes >> 4) & 0x8000) | ((codes << 8) & 0x80000000)
    w3 = multiply_f16(w3, factor) | ((codes >> 12) & 0x8000) | (codes & 0x80000000)
    return w0, w1, w2, w3


@triton.jit
def join_words(w0, w1, w2, w3, w4, w5, w6, w7, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """Eight words of each block, each uint32 [ROWS, BLOCKS] -> int32 [ROWS, 8 BLOCKS], in the order of memory."""
    even = tl.join(tl.join(w0, w4), tl.join(w2, w6))
    odd = tl.join(tl.join(w1, w5), tl.join(w3, w7))
    return tl.reshape(tl.join(even, odd), (ROWS, BLOCKS * 8)).to(tl.int32, bitcast=True)
