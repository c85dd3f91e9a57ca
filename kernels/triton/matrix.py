"""An expert weight [E, N, K] as the products read it, made once for each version of the weights."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import triton
import triton.language as tl

from kernels.quantize import QuantizedTensor
from kernels.swizzle import swizzle_128x4
from kernels.triton.block import decode_word, join_words

TILE = 128  # features, and elements along K, of a tile of words
_BLOCK = 16
_DECODED_AT_A_TIME = 256  # blocks


@dataclass(frozen=True, eq=False)
class ExpertMatrix:
    """E experts of N features of K elements.

    outer: float32 [E, N], the decode scale g of every feature
    decoded: float16 [E, N, K], code times block scale, exact; for the emulated grouped product
    words, word_scales: int32 [E*N*K/8] and uint8 [E*N*K/16], the order of `pack_tiles`; for the product of few
        rows; None where N or K is no multiple of 128
    codes, block_scales: uint8 [E, N, K/2] and uint8 [E, bytes], swizzled; for the native product
    """

    outer: torch.Tensor
    shape: tuple[int, int, int]
    decoded: torch.Tensor | None = None
    words: torch.Tensor | None = None
    word_scales: torch.Tensor | None = None
    codes: torch.Tensor | None = None
    block_scales: torch.Tensor | None = None

    @property
    def native(self) -> bool:
        return self.codes is not None

    @property
    def decodes(self) -> bool:
        """Whether the product of few rows can read it."""
        return self.words is not None

    @classmethod
    def of(cls, weight: QuantizedTensor, *, native: bool) -> ExpertMatrix:
        """From codes [E, N, K/2], block scales [E, N, K/16] in the order of the elements, and outer scales g [E, N] or
        [E, 1].
        """
        assert weight.block_scales is not None and weight.outer_scales is not None
        experts, features, half = weight.codes.shape
        shape = (experts, features, 2 * half)
        outer = weight.outer_scales.expand(experts, features).contiguous()
        if native:
            codes = weight.codes.contiguous()
            return cls(outer, shape, codes=codes, block_scales=swizzle_128x4(weight.block_scales))
        codes, scales = weight.codes.contiguous(), weight.block_scales.contiguous()
        decoded = _decode(codes, scales, shape)
        if features % TILE or shape[2] % TILE:
            return cls(outer, shape, decoded)
        return cls(outer, shape, decoded, *_tiles(codes, scales, shape))

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that there are, by the names of the fields."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}

    def tensors(self) -> list[torch.Tensor]:
        """What `from_tensors` takes."""
        if self.codes is not None and self.block_scales is not None:
            return [self.outer, self.codes, self.block_scales]
        assert self.decoded is not None
        tiles = [] if self.words is None or self.word_scales is None else [self.words, self.word_scales]
        return [self.outer, self.decoded, *tiles]

    @classmethod
    def from_tensors(cls, tensors: list[torch.Tensor]) -> ExpertMatrix:
        outer, main, *rest = tensors
        experts, features, width = main.shape
        if main.dtype is torch.uint8:
            return cls(outer, (experts, features, 2 * width), codes=main, block_scales=rest[0])
        return cls(outer, (experts, features, width), main, *rest)


def _decode(codes: torch.Tensor, scales: torch.Tensor, shape: tuple[int, int, int]) -> torch.Tensor:
    decoded = torch.empty(shape, dtype=torch.float16, device=codes.device)
    blocks = scales.numel()
    _decode_blocks[(triton.cdiv(blocks, _DECODED_AT_A_TIME),)](
        codes.view(torch.int32),
        scales,
        decoded.view(torch.int32),
        blocks,
        BLOCKS=_DECODED_AT_A_TIME,
        num_warps=4,
    )
    return decoded


def _tiles(
    codes: torch.Tensor, scales: torch.Tensor, shape: tuple[int, int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    experts, features, width = shape
    words = torch.empty(codes.numel() // 4, dtype=torch.int32, device=codes.device)
    word_scales = torch.empty(scales.numel(), dtype=torch.uint8, device=codes.device)
    tiles = experts * (features // TILE) * (width // TILE)
    pack_tiles[(tiles,)](codes, scales, words, word_scales, K=width, num_warps=4)
    return words, word_scales


@triton.jit
def _decode_blocks(codes, scales, decoded, blocks, BLOCKS: tl.constexpr):
    """int32 words of eight codes, two a block, and E4M3 bytes -> int32 pairs of float16, eight a block."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inside = block < blocks
    pair = tl.load(codes + block[:, None] * 2 + tl.arange(0, 2)[None, :], mask=inside[:, None], other=0)
    scale = tl.load(scales + block, mask=inside, other=0).to(tl.uint32)
    first, second = tl.split(tl.reshape(pair.to(tl.uint32, bitcast=True), (1, BLOCKS, 2)))
    scale = tl.reshape(scale, (1, BLOCKS))
    d0, d1, d2, d3 = decode_word(first, scale)
    d4, d5, d6, d7 = decode_word(second, scale)
    joined = tl.reshape(join_words(d0, d1, d2, d3, d4, d5, d6, d7, 1, BLOCKS), (BLOCKS * 8,))
    at = tl.program_id(0).to(tl.int64) * (BLOCKS * 8) + tl.arange(0, BLOCKS * 8)
    tl.store(decoded + at, joined, mask=at < blocks.to(tl.int64) * 8)


@triton.jit
def pack_tiles(codes_ptr, scales_ptr, words_out_ptr, scales_out_ptr, K: tl.constexpr):
    """uint8 codes [E*N, K/2] and block scales [E*N, K/16] -> tiles [E*N/128, K/128], one a program.

    words: int32 [2, 2, 4, 8, 4, 4] of a tile. Word (a, b, w, r, c, d) holds, for row 64a + 16w + r and that plus 8, the
    elements 2c, 2c+1, 2c+8, 2c+9 of block 4b + d: what one thread of a 64x16 FP16 operand holds. Nibble i is
    element i, its signs aside: those stand as `kernels.triton.decode_gemm` wants them.
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
    for p in tl.static_range(4):
        packed |= ((natural >> (8 * p + 3)) & 1) << (4 * (3 - p) + 3)
        packed |= ((natural >> (8 * p + 7)) & 1) << (4 * (7 - p) + 3)
    tl.store(words_out_ptr + tile * 2048 + index, packed)
    index = tl.arange(0, 1024)
    h, d, r = index % 2, index // 2 % 4, index // 8 % 8
    w, b, a = index // 64 % 4, index // 256 % 2, index // 512
    scales = tl.load(scales_ptr + (n0 + 64 * a + 16 * w + 8 * h + r) * (K // 16) + block0 + 4 * b + d)
    tl.store(scales_out_ptr + tile * 1024 + index, scales)
