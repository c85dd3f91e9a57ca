"""An expert weight [E, N, K] as the products read it, made once for each version of the weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.quantize import QuantizedTensor
from kernels.swizzle import swizzle_128x4
from kernels.triton.block import decode_word, join_words
from kernels.triton.tiles import TILE, decode_tiles, fits_tiles, tiles_of

_BLOCK = 16
_DECODED_AT_A_TIME = 256  # blocks


@dataclass(frozen=True, eq=False)
class ExpertMatrix:
    """E experts of N features of K elements.

    outer: float32 [E, N], the decode scale g of every feature
    decoded: float16 [E, N, K], code times block scale, exact; for the emulated grouped product; None where the matrix
        is compact: products read `words` then, or decode them first where rows are very many
    words, word_scales: int32 and uint8, E*N*K/8 and E*N*K/16 of them in the order of `pack_tiles`; for products that
        read 4 bits; None where N or K is no multiple of 128
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
    def compact(self) -> bool:
        """Whether it is held in 4 bits alone, for products that read it so."""
        return self.decoded is None and not self.native

    @property
    def packed(self) -> bool:
        """Whether products that read 4 bits can read it."""
        return self.words is not None

    @classmethod
    def of(cls, weight: QuantizedTensor, *, native: bool, compact: bool = False) -> ExpertMatrix:
        """From codes [E, N, K/2], block scales [E, N, K/16] in the order of the elements, and outer scales g [E, N] or
        [E, 1]. compact: 4.5 bits an element instead of 20.5, where the shape allows it.
        """
        assert weight.block_scales is not None and weight.outer_scales is not None
        experts, features, half = weight.codes.shape
        shape = (experts, features, 2 * half)
        outer = weight.outer_scales.expand(experts, features).contiguous()
        if native:
            codes = weight.codes.contiguous()
            return cls(outer, shape, codes=codes, block_scales=swizzle_128x4(weight.block_scales))
        codes, scales = weight.codes.contiguous(), weight.block_scales.contiguous()
        if not fits_tiles(shape):
            return cls(outer, shape, _decode(codes, scales, shape))
        decoded = None if compact else _decode(codes, scales, shape)
        return cls(outer, shape, decoded, *tiles_of(codes, scales, shape))

    @classmethod
    def of_tiles(
        cls,
        words: torch.Tensor,
        word_scales: torch.Tensor,
        outer_scales: torch.Tensor,
        *,
        compact: bool = False,
    ) -> ExpertMatrix:
        """From the tiles of `kernels.tiles`, which it keeps as they are, for the emulated products; outer_scales and
        compact as in `of`.
        """
        experts, down, across, _ = words.shape
        shape = (experts, down * TILE, across * TILE)
        outer = outer_scales.expand(shape[:2]).contiguous()
        decoded = None if compact else decode_tiles(words, word_scales, shape)
        return cls(outer, shape, decoded, words, word_scales)

    def elements(self) -> torch.Tensor:
        """`decoded`; of a compact matrix anew in each call. Not for a native one."""
        if self.decoded is not None:
            return self.decoded
        assert self.words is not None and self.word_scales is not None
        return decode_tiles(self.words, self.word_scales, self.shape)

    def derived(self) -> dict[str, torch.Tensor]:
        """What holds the weights, once, by the names of the fields: the same for a compact matrix and another one."""
        parts = {"outer": self.outer}
        if self.words is not None and self.word_scales is not None:
            return parts | {"words": self.words, "word_scales": self.word_scales}
        if self.codes is not None and self.block_scales is not None:
            return parts | {"codes": self.codes, "block_scales": self.block_scales}
        assert self.decoded is not None
        return parts | {"decoded": self.decoded}

    def tensors(self) -> list[torch.Tensor]:
        """What `from_tensors` takes."""
        parts = (self.decoded, self.words, self.word_scales, self.codes, self.block_scales)
        return [self.outer, *(part for part in parts if part is not None)]

    @classmethod
    def from_tensors(cls, tensors: list[torch.Tensor]) -> ExpertMatrix:
        outer, *parts = tensors
        experts, features = outer.shape
        decoded = parts.pop(0) if parts[0].dtype is torch.float16 else None
        if parts and parts[0].dtype is torch.uint8:
            codes, block_scales = parts
            return cls(outer, (experts, features, 2 * codes.shape[2]), codes=codes, block_scales=block_scales)
        width = decoded.shape[2] if decoded is not None else parts[0].numel() * 8 // (experts * features)
        return cls(outer, (experts, features, width), decoded, *parts)


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
    tl.store(decoded + at, joined, mask=at < tl.cast(blocks, tl.int64) * 8)
