"""Weights in contiguous tiles of 128 features by 128 elements, ordered as the tensor core's registers want them.

A decoded word of a tile never leaves its thread on the way into a product (`kernels.triton.decode_gemm`,
`kernels.triton.packed_gemm`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

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
    elements 2c, 2c+1, 2c+8, 2c+9 of block 4b + d: what one thread of a 64x16 FP16 operand holds. How their bits stand
    in the word is said at `_DECODE`.
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
    packed = tl.zeros_like(natural)
    for i in tl.static_range(4):
        upper, lower = natural >> (4 * i), natural >> (4 * i + 16)
        packed |= ((upper & 7) << (8 * i + 2)) | (((upper >> 3) & 1) << (8 * i + 7))
        packed |= (((lower >> 1) & 3) << (8 * i + 5)) | ((lower & 1) << (8 * i))
        packed |= ((lower >> 3) & 1) << ((8 * i + 9) % 32)
    tl.store(words_out_ptr + tile * 2048 + index, packed)
    index = tl.arange(0, 1024)
    h, d, r = index % 2, index // 2 % 4, index // 8 % 8
    w, b, a = index // 64 % 4, index // 256 % 2, index // 512
    scales = tl.load(scales_ptr + (n0 + 64 * a + 16 * w + 8 * h + r) * (K // 16) + block0 + 4 * b + d)
    tl.store(scales_out_ptr + tile * 1024 + index, scales)


# The bits of an E2M1 number, moved to those of E4M3 (sign 7, exponent 6-3, mantissa 2-0), are the number over 64, and
# the hardware makes two FP16 numbers of two such bytes. Byte i of a word holds an element of the upper row as such a
# byte (bits 7, 4-2) and one of the lower row in what is left: exponent in bits 6-5, mantissa in bit 0, sign in bit 1 of
# the next byte, so that a rotation and a shift by two bring all of it to its place. The 64 goes to the scale.
_DECODE = tl.constexpr("""
{
    .reg .b32 upper, lower, moved, scale, of_upper, of_lower, v;
    .reg .b16 u0, u1, l0, l1, s0, s1;
    and.b32 upper, $8, 0x9C9C9C9C;
    shf.r.wrap.b32 lower, $8, $8, 2;
    and.b32 lower, lower, 0x98989898;
    shl.b32 moved, $8, 2;
    lop3.b32 lower, moved, 0x04040404, lower, 0xEA;
    mov.b32 {u0, u1}, upper;
    mov.b32 {l0, l1}, lower;
    mov.b32 scale, {$9, $10};
    mov.b32 v, 0x54005400; // 64, twice
    mul.rn.f16x2 scale, scale, v;
    mov.b32 {s0, s1}, scale;
    mov.b32 of_upper, {s0, s0};
    mov.b32 of_lower, {s1, s1};
    cvt.rn.f16x2.e4m3x2 v, u0;
    mul.rn.f16x2 v, v, of_upper;
    mov.b32 {$0, $1}, v;
    cvt.rn.f16x2.e4m3x2 v, u1;
    mul.rn.f16x2 v, v, of_upper;
    mov.b32 {$2, $3}, v;
    cvt.rn.f16x2.e4m3x2 v, l0;
    mul.rn.f16x2 v, v, of_lower;
    mov.b32 {$4, $5}, v;
    cvt.rn.f16x2.e4m3x2 v, l1;
    mul.rn.f16x2 v, v, of_lower;
    mov.b32 {$6, $7}, v;
}
""")
# Not pure, so that it stands where it is among products, which are not either.
_BEHIND_PRODUCTS = tl.constexpr("""
{
    wgmma.wait_group.sync.aligned 0;
    mov.b32 $0, $4;
    mov.b32 $1, $5;
    mov.b32 $2, $6;
    mov.b32 $3, $7;
}
""")
_CONSTRAINTS = tl.constexpr("=h,=h,=h,=h,=h,=h,=h,=h,r,h,h")


@triton.jit
def _element(words, scales, i: tl.constexpr):
    """Element i of every word, times its scale, in float16: exact. For the interpreter, which runs no assembly."""
    byte: tl.constexpr = 8 * (i % 4)
    if i < 4:
        code, sign = (words >> (byte + 2)) & 7, (words >> (byte + 7)) & 1
    else:
        code = (((words >> (byte + 5)) & 3) << 1) | ((words >> byte) & 1)
        sign = (words >> ((byte + 9) % 32)) & 1
    value = ((code << 9) | (sign << 15)).to(tl.uint16).to(tl.float16, bitcast=True) * 16384.0
    return value.to(tl.float16) * scales


@triton.jit
def behind_products(words):
    """int32 words, to be decoded into registers once no product reads any.

    Hopper's tensor core reads an operand in registers some time after the product is launched. Neither Triton 3.6 nor
    ptxas keeps the next turn of a loop from writing to them before (Triton's issue 9433).
    """
    # Blackwell has no such wait; without a GPU, where the target is not known here, kernels are compiled for Hopper.
    if COMPILED and not cuda_capability_geq(10):
        return tl.inline_asm_elementwise(_BEHIND_PRODUCTS, "=r,=r,=r,=r,r,r,r,r", [words], tl.int32, False, 4)
    return words


@triton.jit
def decoded_tile(words, scales, HALVES: tl.constexpr):
    """int32 words [2, HALVES, 4, 8, 4, 4] and their block scales [2, HALVES, 4, 8, 4, 2], flat, in the order of
    `pack_tiles` -> float16 [128, 64 HALVES], features by elements, code times block scale.
    """
    words = words.reshape(2, HALVES, 4, 8, 4, 4)
    upper, lower = tl.split(scales.to(tl.float16).reshape(2, HALVES, 4, 8, 4, 2))
    upper = tl.broadcast_to(upper[:, :, :, :, None, :], (2, HALVES, 4, 8, 4, 4))
    lower = tl.broadcast_to(lower[:, :, :, :, None, :], (2, HALVES, 4, 8, 4, 4))
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
    return tl.reshape(ordered, (128, 64 * HALVES))


@triton.jit
def load_tile(words_ptr, scales_ptr, tile, OPERAND: tl.constexpr):
    """Tile number `tile` of `pack_tiles` -> float16 [128, 128], features by elements, code times block scale.
    OPERAND: of a product in a loop.
    """
    words = tl.load(words_ptr + tile * 2048 + tl.arange(0, 2048))
    scales = tl.load(scales_ptr + tile * 1024 + tl.arange(0, 1024))
    if OPERAND:
        words = behind_products(words)
    return decoded_tile(words, scales, 2)


@triton.jit
def load_half_tile(words_ptr, scales_ptr, half):
    """Of tile `half // 2` the first or second 64 elements, [128, 64], as `load_tile` for a product in a loop."""
    word, scale = tl.arange(0, 1024), tl.arange(0, 512)
    words_at = half // 2 * 2048 + half % 2 * 512 + word // 512 * 1024 + word % 512
    scales_at = half // 2 * 1024 + half % 2 * 256 + scale // 256 * 512 + scale % 256
    words, scales = tl.load(words_ptr + words_at), tl.load(scales_ptr + scales_at)
    return decoded_tile(behind_products(words), scales, 1)


@triton.jit
def _decode_tiles(words_ptr, scales_ptr, decoded_ptr, K: tl.constexpr):
    """A tile a program, into its place in [E*N, K]."""
    tile = tl.program_id(0).to(tl.int64)
    rows = tile // (K // 128) * 128 + tl.arange(0, 128)
    columns = tile % (K // 128) * 128 + tl.arange(0, 128)
    tl.store(
        decoded_ptr + rows[:, None] * K + columns[None, :], load_tile(words_ptr, scales_ptr, tile, False)
    )
