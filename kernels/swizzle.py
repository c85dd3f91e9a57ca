"""The order in which tensor cores read block scales: tiles of 128 rows by 4 blocks, 512 bytes each.

The scale of row m and block k stands at byte

    (m // 128 * ceil(C / 4) + k // 4) * 512 + m % 32 * 16 + m // 32 % 4 * 4 + k % 4

of a tensor of C blocks a row (cuBLAS, "1D Block Scaling Factors Layout"). Padding is zero.
"""

from __future__ import annotations

import torch

ROWS, COLUMNS = 128, 4


def swizzled_size(rows: int, columns: int) -> int:
    """Bytes of a swizzled [rows, columns]."""
    return -(-rows // ROWS) * ROWS * -(-columns // COLUMNS) * COLUMNS


def swizzle_128x4(scales: torch.Tensor) -> torch.Tensor:
    """uint8 [..., R, C] -> uint8 [..., swizzled_size(R, C)]; every leading index starts a tile of its own."""
    *lead, rows, columns = scales.shape
    row_tiles, column_tiles = -(-rows // ROWS), -(-columns // COLUMNS)
    padded = scales.new_zeros(*lead, row_tiles * ROWS, column_tiles * COLUMNS)
    padded[..., :rows, :columns] = scales
    tiles = padded.view(*lead, row_tiles, 4, 32, column_tiles, COLUMNS)
    # row tile, row // 32 % 4, row % 32, column tile, ... -> row tile, column tile, row % 32, row // 32 % 4, ...
    return tiles.movedim((-2, -3, -4), (-4, -3, -2)).flatten(len(lead))


def unswizzle_128x4(swizzled: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The inverse: uint8 [..., swizzled_size(rows, columns)] -> uint8 [..., rows, columns].

    Raises ValueError for another size.
    """
    *lead, size = swizzled.shape
    if size != swizzled_size(rows, columns):
        expected = swizzled_size(rows, columns)
        raise ValueError(f"swizzled scales of {rows} x {columns} blocks need {expected} bytes, got {size}")
    row_tiles, column_tiles = -(-rows // ROWS), -(-columns // COLUMNS)
    tiles = swizzled.view(*lead, row_tiles, column_tiles, 32, 4, COLUMNS)
    padded = tiles.movedim((-4, -3, -2), (-2, -3, -4)).reshape(
        *lead, row_tiles * ROWS, column_tiles * COLUMNS
    )
    return padded[..., :rows, :columns].contiguous()
