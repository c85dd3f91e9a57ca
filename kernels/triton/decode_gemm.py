"""Products of few rows an expert with 4-bit weights read packed: bound by the bytes of the weights, not by arithmetic.

The same composition as `kernels.triton.grouped_gemm`, and the same order of sums along K. A program takes 128 output
features of one expert and all of the expert's rows; weights are the tall side of the product, so that 16 rows fill
the tensor core. Weights stand in contiguous tiles of 128 features by 128 elements, ordered as the tensor core's
registers want them (`pack_tiles`), so that a decoded word never leaves its thread.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.codec import COMPILED
from kernels.triton.grouped_gemm import as_stored, check_operand, to_bf16
from kernels.triton.grouping import ExpertGroups
from kernels.triton.matrix import TILE, ExpertMatrix
from kernels.triton.quantize import GroupedOperand
from kernels.triton.tuning import DecodeTile, decode_tile


def decode_gemm(
    operand: GroupedOperand,
    weight: ExpertMatrix,
    groups: ExpertGroups,
    *,
    out: torch.Tensor,
    tile: DecodeTile | None = None,
) -> torch.Tensor:
    """As `kernels.triton.grouped_gemm.grouped_gemm`, bit for bit, but for few rows an expert; rows in padding are not
    written. `groups` may be aligned to any number of rows. Raises ValueError for operands that do not fit or that are
    not decoded, and for weights whose N or K is no multiple of 128.
    """
    experts, features, width = weight.shape
    if weight.words is None or weight.word_scales is None or operand.decoded is None:
        raise ValueError(
            f"products of few rows need a decoded operand and weights of multiples of {TILE}, got {weight.shape}"
        )
    check_operand(operand.decoded, operand.outer_scales, weight, groups, out)
    if not groups.rows:
        return out
    slots = groups.row_of_slot.numel()
    tile = tile or decode_tile(slots, experts)
    decode_product[(experts * features // TILE,)](
        operand.decoded,
        operand.outer_scales,
        weight.words,
        weight.word_scales.view(torch.float8_e4m3fn),
        weight.outer,
        as_stored(out),
        groups.starts,
        groups.counts,
        N=features,
        K=width,
        BM=tile.rows,
        STAGES=tile.stages,
        num_warps=tile.warps,
    )
    return out


# An FP16 number's high byte holds all of an E2M1 value: `prmt` looks four of them up by the low three bits of four
# nibbles. Bit 3 of nibble 3-p is the sign of element 2p, bit 3 of nibble 7-p that of 2p+1: one shift brings both to
# their places in a pair of FP16 numbers.
_DECODE = tl.constexpr("""
{
    .reg .b32 sel, up, lo, hi, s, v, t;
    and.b32 sel, $8, 0x77777777;
    shr.u32 up, sel, 16;
    prmt.b32 lo, 0x3E3C3800, 0x46444240, sel;
    prmt.b32 hi, 0x3E3C3800, 0x46444240, up;
    mov.b32 s, {$9, $9};
    prmt.b32 v, lo, 0, 0x1404;
    and.b32 t, $8, 0x80008000;
    or.b32 v, v, t;
    mul.rn.f16x2 v, v, s;
    mov.b32 {$0, $1}, v;
    prmt.b32 v, lo, 0, 0x3424;
    shl.b32 t, $8, 4;
    and.b32 t, t, 0x80008000;
    or.b32 v, v, t;
    mul.rn.f16x2 v, v, s;
    mov.b32 {$2, $3}, v;
    mov.b32 s, {$10, $10};
    prmt.b32 v, hi, 0, 0x1404;
    shl.b32 t, $8, 8;
    and.b32 t, t, 0x80008000;
    or.b32 v, v, t;
    mul.rn.f16x2 v, v, s;
    mov.b32 {$4, $5}, v;
    prmt.b32 v, hi, 0, 0x3424;
    shl.b32 t, $8, 12;
    and.b32 t, t, 0x80008000;
    or.b32 v, v, t;
    mul.rn.f16x2 v, v, s;
    mov.b32 {$6, $7}, v;
}
""")
_CONSTRAINTS = tl.constexpr("=h,=h,=h,=h,=h,=h,=h,=h,r,h,h")


@triton.jit
def _element(words, scales, i: tl.constexpr):
    """Element i of every word, times its scale, in float16: exact. For the interpreter, which runs no assembly."""
    sign_bit: tl.constexpr = 4 * (3 - i // 2 + 4 * (i % 2)) + 3
    code = (words >> (4 * i)) & 7
    sign = (words >> sign_bit) & 1
    value = ((code << 9) | (sign << 15)).to(tl.uint16).to(tl.float16, bitcast=True) * 16384.0
    return value.to(tl.float16) * scales


@triton.jit
def decoded_tile(words, upper, lower):
    """int32 words [2, 2, 4, 8, 4, 4] and the scales of their two rows -> float16 [128, 128], code times block scale."""
    if COMPILED:
        v0, v1, v2, v3, v4, v5, v6, v7 = tl.inline_asm_elementwise(
            _DECODE, _CONSTRAINTS, [words, upper, lower], dtype=(tl.float16,) * 8, is_pure=True, pack=1
        )
    else:
        v0, v1 = _element(words, upper, 0), _element(words, upper, 1)
        v2, v3 = _element(words, upper, 2), _element(words, upper, 3)
        v4, v5 = _element(words, lower, 4), _element(words, lower, 5)
        v6, v7 = _element(words, lower, 6), _element(words, lower, 7)
    # `join` puts its two operands along a new last axis, so the first pairing varies slowest.
    even = tl.join(tl.join(v0, v4), tl.join(v2, v6))
    odd = tl.join(tl.join(v1, v5), tl.join(v3, v7))
    # 64 rows, 4 blocks, 16 rows, row, pair, block; row half, pair half, element -> rows; elements
    ordered = tl.permute(tl.join(even, odd), (0, 2, 6, 3, 1, 5, 7, 4, 8))
    return tl.reshape(ordered, (128, 128))


@triton.jit
def decode_product(
    x_ptr,
    ga_ptr,
    words_ptr,
    scales_ptr,
    gb_ptr,
    out_ptr,
    starts_ptr,
    counts_ptr,
    N: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    STAGES: tl.constexpr,
):
    """x: float16 [R, K]; words, scales: `pack_tiles`; out: bfloat16 [R, N]. Rows in padding are left as they are."""
    ROW_TILES: tl.constexpr = N // 128
    K_TILES: tl.constexpr = K // 128
    e = tl.program_id(0) // ROW_TILES
    count = tl.load(counts_ptr + e)
    if count > 0:
        first = tl.load(starts_ptr + e)
        tile = tl.program_id(0).to(tl.int64) * K_TILES
        columns = tl.program_id(0) % ROW_TILES * 128 + tl.arange(0, 128)
        gb = tl.load(gb_ptr + e.to(tl.int64) * N + columns)
        for m in range(0, count, BM):
            inside = m + tl.arange(0, BM) < count
            rows = (first + m + tl.arange(0, BM)).to(tl.int64)
            acc = tl.zeros((128, BM), tl.float32)
            for k in tl.range(0, K_TILES, num_stages=STAGES):
                words = tl.load(words_ptr + (tile + k) * 2048 + tl.arange(0, 2048)).reshape(2, 2, 4, 8, 4, 4)
                scales = tl.load(scales_ptr + (tile + k) * 1024 + tl.arange(0, 1024)).reshape(
                    2, 2, 4, 8, 4, 2
                )
                upper, lower = tl.split(scales.to(tl.float16))
                upper = tl.broadcast_to(upper[:, :, :, :, None, :], (2, 2, 4, 8, 4, 4))
                lower = tl.broadcast_to(lower[:, :, :, :, None, :], (2, 2, 4, 8, 4, 4))
                x = tl.load(
                    x_ptr + rows[:, None] * K + (k * 128 + tl.arange(0, 128))[None, :],
                    mask=inside[:, None],
                    other=0.0,
                )
                acc = tl.dot(decoded_tile(words, upper, lower), x.T, acc)
            ga = tl.load(ga_ptr + rows, mask=inside, other=0.0)
            value = to_bf16(acc * (ga[None, :] * gb[:, None]))
            tl.store(out_ptr + rows[None, :] * N + columns[:, None], value, mask=inside[None, :])
