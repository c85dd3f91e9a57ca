"""What programs of the attention kernels own: blocks of queries or keys, of sequences of different lengths."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import triton


@dataclass(frozen=True)
class Tile:
    """queries x keys at a time. Whichever a program owns is a multiple of the other."""

    queries: int
    keys: int
    stages: int
    warps: int


@dataclass(frozen=True)
class Tiling:
    forward: Tile
    d_query: Tile
    d_key: Tile


# Measured on an H200, but for heads of 256.
_NARROW = Tiling(Tile(64, 64, 3, 4), Tile(64, 64, 3, 4), Tile(64, 64, 2, 4))  # heads up to 64 wide
_MAIN = Tiling(Tile(64, 64, 3, 4), Tile(64, 64, 2, 4), Tile(64, 64, 2, 4))
_WIDE = Tiling(Tile(128, 64, 2, 8), Tile(64, 32, 2, 4), Tile(32, 64, 2, 8))


def tiling(width: int) -> Tiling:
    """For heads so wide."""
    return _NARROW if width <= 64 else _MAIN if width == 128 else _WIDE


@dataclass(frozen=True, eq=False)
class Blocks:
    """The blocks that programs own: tables of (sequence start, sequence end, offset of the block in the sequence,
    number of the sequence), int32 [N, 4], most work first. N is an upper bound; entries beyond the last block are zero.
    Made without waiting for the device, once for each block size, so that layers may share an instance.

    bounds: int32 [B + 1], sequence b is tokens bounds[b] to bounds[b + 1]; longest: at least the longest sequence.
    """

    bounds: torch.Tensor
    longest: int
    tokens: int
    _tables: dict[tuple[int, bool], torch.Tensor] = field(default_factory=dict, init=False, repr=False)

    def of_queries(self, size: int) -> torch.Tensor:
        """The later in its sequence, the more keys a block has."""
        return self._table(size, keys=False)

    def of_keys(self, size: int) -> torch.Tensor:
        """The earlier in its sequence, the more queries a block has."""
        return self._table(size, keys=True)

    def _table(self, size: int, *, keys: bool) -> torch.Tensor:
        if (size, keys) not in self._tables:
            self._tables[size, keys] = self._make(size, keys=keys)
        return self._tables[size, keys]

    def _make(self, size: int, *, keys: bool) -> torch.Tensor:
        count = len(self.bounds) - 1
        most = min(self.tokens // size + count, count * triton.cdiv(self.longest, size))
        starts, stops = self.bounds[:-1], self.bounds[1:]
        blocks = (stops - starts + size - 1) // size
        ends = blocks.cumsum(0, dtype=torch.int32)
        index = torch.arange(most, dtype=torch.int32, device=self.bounds.device)
        sequence = torch.searchsorted(ends, index, right=True)
        there = sequence < count
        sequence = sequence.clamp(max=count - 1)
        block = index - (ends - blocks)[sequence]
        work = (blocks[sequence] - block if keys else block + 1).where(there, 0)
        columns = (starts[sequence], stops[sequence], block * size, sequence.int())
        table = torch.stack(columns, 1).where(there[:, None], 0)
        return table[work.argsort(descending=True, stable=True)]
