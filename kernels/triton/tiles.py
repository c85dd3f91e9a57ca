"""Weights in contiguous tiles of 128 features by 128 elements, ordered as the tensor core's registers want them.

A decoded word of a tile never leaves its thread on the way into a product (`kernels.triton.decode_gemm`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.codec import COMPILED

TILE = 128  # features, and elements along K, of a tile of words


def fits_tiles(shape: tuple[int, int, int]) -> bool:
    """Whether weights [E, N, K] can stand in tiles."""
    return shape[1] % TILE == 0 and shape[2] % TILE == 0


def tiles_of(
    codes: torch.Tensor, scales: torch.Tensor, shape: tuple[int, int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [E, N, K/2] and block scales [E, N, K/16] -> words int32 [E*N*K/8] and uint8 scales [E*N*K/16], in the
    order of `pack_tiles`.
    """
    experts, features, width = shape
    words = torch.empty(codes.numel() // 4, dtype=torch.int32, device=codes.device)
    word_scales = torch.empty(scales.numel(), dtype=torch.uint8, device=codes.device)
    tiles = experts * (features // TILE) * (width // TILE)
    pack_tiles[(tiles,)](codes, scales, words, word_scales, K=width, num_warps=4)
    return words, word_scales


def decode_tiles(words: torch.Tensor, scales: torch.Tensor, shape: tuple[int, int, int]) -> torch.Tensor:
    """The inverse, decoded: float16 [E, N, K], code times block scale, exact."""
    experts, features, width = shape
    decoded = torch.empty(shape, dtype=torch.float16, device=words.device)
    tiles = experts * (features // TILE) * (width // TILE)
    if tiles:
        _decode_tiles[(tiles,)](words, scales.view(torch.float8_e4m3fn), decoded, K=width, num_warps=4)
    return decoded


@triton.jit
def pack_tiles(codes_ptr, scales_ptr, words_out_ptr, scales_out_ptr, K: tl.constexpr):
    """uint8 codes [E*N, K/2] and block scales [E*N, K/16] -> tiles [E*N/128, K/128], one a program.

    words: int32 [2, 2, 4, 8, 4, 4] of a tile. Word (a, b, w, r, c, d) holds, for row 64a + 16w + r and that plus 8, the
    elements 2c, 2c+1, 2c+8, 2c+9 of block 4b + d: what one thread of a 64x16 FP16 operand holds. Nibble i is
    element i, its signs aside: those stand as `decoded_tile` wants them.
    scales: uint8 [2, 2, 4, 8, 4, 2], those of block 4b + d of the same two rows.
    """
    K_TILES: tl.constexpr = K // 128
    tile = tl.program_id(0).to(tl.int64)
    n0, block0 = tile // K_TILES * 128, tile % K_TILES * 8
    index = tl.arange(0, 2048)
    d, c, r = index % 4, index // 4 % 4, index // 16 % 8
    w, b, a = index // 128 % 4, index // 512 % 2, index // 1024
    first = codes_ptr + (n0 + 64 * a + 16 * w + r) * (K // 2) + (block0 + 4 * b + d) * 8 + c
    natural = tl.load(first).to(tl.int32) | (tl.load(first + 4).to(tl.int32) << 8)
    second = first + 8 * (K // 2)
    natural |= (tl.load(second).to(tl.int32) << 16) | (tl.load(second + 4).to(tl.int32) << 24)
    packed = natural & 0x77777777
    for i in tl.static_range(4):
        packed |= ((natural >> (4 * i + 3)) & 1) << (8 * i + 7)
        packed |= ((natural >> (4 * i + 19)) & 1) << (8 * i + 3)
    tl.store(words_out_ptr + tile * 2048 + index, packed)
    index = tl.arange(0, 1024)
    h, d, r = index % 2, index // 2 % 4, index // 8 % 8
    w, b, a = index // 64 % 4, index // 256 % 2, index // 512
    scales = tl.load(scales_ptr + (n0 + 64 * a + 16 * w + 8 * h + r) * (K // 16) + block0 + 4 * b + d)
    tl.store(scales_out_ptr + tile * 1024 + index, scales)


# An FP16 number's high byte holds all of an E2M1 value: `prmt` looks four of them up by the low three bits of four
# nibbles. Bit 8i+7 of a word is the sign of element i, bit 8i+3 that of element 4+i: one mask brings four to their
# bytes. Another `prmt` makes two bytes a pair of FP16 numbers.
_DECODE = tl.constexpr("""
{
    .reg .b32 sel, lo, hi, s, t, v;
    and.b32 sel, $8, 0x77777777;
    prmt.b32 lo, $11, 0x46444240, sel;
    shr.u32 sel, sel, 16;
    prmt.b32 hi, $11, 0x46444240, sel;
    lop3.b32 lo, $8, 0x80808080, lo, 0xEA;
    shl.b32 t, $8, 4;
    lop3.b32 hi, t, 0x80808080, hi, 0xEA;
    mov.b32 s, {$9, $9};
    prmt.b32 v, lo, 0, 0x1404;
    mul.rn.f16x2 v, v, s;
    mov.b32 {$0, $1}, v;
    prmt.b32 v, lo, 0, 0x3424;
    mul.rn.f16x2 v, v, s;
    mov.b32 {$2, $3}, v;
    mov.b32 s, {$10, $10};
    prmt.b32 v, hi, 0, 0x1404;
    mul.rn.f16x2 v, v, s;
    mov.b32 {$4, $5}, v;
    prmt.b32 v, hi, 0, 0x3424;
    mul.rn.f16x2 v, v, s;
    mov.b32 {$6, $7}, v;
}
""")
_CONSTRAINTS = tl.constexpr("=h,=h,=h,=h,=h,=h,=h,=h,r,h,h,r")
# 0x3E3C3800, in a way that the assembler does not see through: it would move a constant into a register at every use.
_LOW_MAGNITUDES = tl.constexpr("""
{
    .reg .b32 zero;
    mov.u32 zero, %laneid;
    shr.u32 zero, zero, 5;
    add.u32 $0, zero, 0x3E3C3800; // for $1
}
""")


@triton.jit
def _element(words, scales, i: tl.constexpr):
    """Element i of every word, times its scale, in float16: exact. For the interpreter, which runs no assembly."""
    sign_bit: tl.constexpr = 8 * (i % 4) + 7 - i // 4 * 4
    code = (words >> (4 * i)) & 7
    sign = (words >> sign_bit) & 1
    value = ((code << 9) | (sign << 15)).to(tl.uint16).to(tl.float16, bitcast=True) * 16384.0
    return value.to(tl.float16) * scales


@triton.jit
def decoded_tile(words, upper, lower):
    """int32 words [2, 2, 4, 8, 4, 4] and the scales of their two rows -> float16 [128, 128], code times block scale."""
    if COMPILED:
        none = tl.zeros((2, 2, 4, 8, 4, 4), tl.int32)
        low = tl.inline_asm_elementwise(_LOW_MAGNITUDES, "=r,r", [none], tl.int32, is_pure=True, pack=1)
        v0, v1, v2, v3, v4, v5, v6, v7 = tl.inline_asm_elementwise(
            _DECODE, _CONSTRAINTS, [words, upper, lower, low], dtype=(tl.float16,) * 8, is_pure=True, pack=1
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
def load_tile(words_ptr, scales_ptr, tile):
    """Tile number `tile` of `pack_tiles` -> float16 [128, 128], features by elements, code times block scale."""
    words = tl.load(words_ptr + tile * 2048 + tl.arange(0, 2048)).reshape(2, 2, 4, 8, 4, 4)
    scales = tl.load(scales_ptr + tile * 1024 + tl.arange(0, 1024)).reshape(2, 2, 4, 8, 4, 2)
    upper, lower = tl.split(scales.to(tl.float16))
    upper = tl.broadcast_to(upper[:, :, :, :, None, :], (2, 2, 4, 8, 4, 4))
    lower = tl.broadcast_to(lower[:, :, :, :, None, :], (2, 2, 4, 8, 4, 4))
    return decoded_tile(words, upper, lower)


@triton.jit
def _decode_tiles(words_ptr, scales_ptr, decoded_ptr, K: tl.constexpr):
    """A tile a program, into its place in [E*N, K]."""
    tile = tl.program_id(0).to(tl.int64)
    rows = tile // (K // 128) * 128 + tl.arange(0, 128)
    columns = tile % (K // 128) * 128 + tl.arange(0, 128)
    tl.store(decoded_ptr + rows[:, None] * K + columns[None, :], load_tile(words_ptr, scales_ptr, tile))
