"""4-bit weights in tiles of 128 features by 128 elements, in plain PyTorch: a permutation of codes and block scales.

The order is the one that `kernels.triton.tiles.pack_tiles` defines, as tensor cores with 16-bit operands want it. A
tile is 2048 words of eight codes, int32 [2, 2, 4, 8, 4, 4]: word (a, b, w, r, c, d) holds, of row 64a + 16w + r and of
the one eight below it, the bytes c and c + 4 of block 4b + d; in which bits, `_MOVES` says. Scales of a tile: uint8 [2,
2, 4, 8, 4, 2], of which (a, b, w, r, d, half) belongs to row 64a + 16w + 8 half + r and block 4b + d.
"""

from __future__ import annotations

import torch

TILE = 128
WORDS, SCALES = TILE * TILE // 8, TILE * TILE // 16  # of a tile
# (bits, from, to): code i of the upper row stands in bits 4i to 4i + 3, that of the lower one 16 bits above it.
_MOVES = tuple(
    (bits, source, target)
    for i in range(4)
    for bits, source, target in (
        (3, 4 * i, 8 * i + 2),  # magnitude
        (1, 4 * i + 3, 8 * i + 7),  # sign
        (1, 4 * i + 16, 8 * i),  # mantissa
        (2, 4 * i + 17, 8 * i + 5),  # exponent
        (1, 4 * i + 19, (8 * i + 9) % 32),  # sign
    )
)


def to_tiles(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 codes [E, N, K/2] (the even element in the low nibble) and block scales [E, N, K/16] -> int32 words [E,
    N/128, K/128, 2048] and uint8 scales [E, N/128, K/128, 1024]. Raises ValueError unless N and K are multiples of 128.
    """
    experts, features, half = codes.shape
    if features % TILE or 2 * half % TILE:
        raise ValueError(f"tiles hold multiples of {TILE} features and elements, got {features} x {2 * half}")
    grid = experts, features // TILE, half * 2 // TILE
    rows = (experts, grid[1], 2, 4, 2, 8, grid[2], 2, 4)  # expert, tile; a, w, half, r; tile; b, d
    bytes_ = codes.contiguous().view(*rows, 2, 4).permute(0, 1, 6, 2, 7, 3, 5, 10, 8, 4, 9)
    words = _moved(bytes_.flatten().view(torch.int32), back=False).view(*grid, WORDS)
    ordered = scales.contiguous().view(rows).permute(0, 1, 6, 2, 7, 3, 5, 8, 4)
    return words, ordered.reshape(*grid, SCALES)


def from_tiles(words: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of `to_tiles`."""
    experts, down, across, _ = words.shape
    shape = experts, down * TILE
    bytes_ = (
        _moved(words.contiguous(), back=True)
        .view(torch.uint8)
        .view(experts, down, across, 2, 2, 4, 8, 4, 4, 2, 2)
    )
    codes = bytes_.permute(0, 1, 3, 5, 9, 6, 2, 4, 8, 10, 7).reshape(*shape, across * TILE // 2)
    ordered = scales.contiguous().view(experts, down, across, 2, 2, 4, 8, 4, 2)
    return codes, ordered.permute(0, 1, 3, 5, 8, 6, 2, 4, 7).reshape(*shape, across * TILE // 16)


def _moved(words: torch.Tensor, back: bool) -> torch.Tensor:
    """int32 words, their bits from where codes in a row have them to where a tile has them, or back."""
    moved = torch.zeros_like(words)
    for bits, source, target in _MOVES:
        source, target = (target, source) if back else (source, target)
        moved |= ((words >> source) & ((1 << bits) - 1)) << target
    return moved
