"""Rotary positions (Su et al. 2021, arXiv 2104.09864): element i is rotated with element i + D/2."""

from __future__ import annotations

import math
from functools import cache

import torch

from kernels.model_spec import TableType


class RotaryTable:
    """Cosines and sines of position * theta^(-2 i / D), each computed in FP64 by itself and rounded once.

    Grows with the positions asked for; an entry does not depend on how many others there are.
    """

    def __init__(self, head_dim: int, theta: float, kind: TableType) -> None:
        self._head_dim, self._theta = head_dim, theta
        self.round_to(kind)

    def round_to(self, kind: TableType) -> None:
        """Whatever it was before."""
        self._kind, self._table = kind, torch.empty(0)

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[T, heads, D] at int64 [T] -> the same in x.dtype; products and sums in FP32, cast once."""
        needed = int(positions.max()) + 1 if positions.numel() else 1
        if needed > len(self._table) or self._table.device != x.device:
            length = 1 << (needed - 1).bit_length()
            self._table = _table(length, self._head_dim, self._theta, self._kind).to(x.device)
        cosines, sines = self._table[positions][:, None].chunk(2, dim=-1)
        first, second = x.float().chunk(2, dim=-1)
        rotated = (first * cosines - second * sines, second * cosines + first * sines)
        return torch.cat(rotated, dim=-1).to(x.dtype)


@cache
def _table(length: int, head_dim: int, theta: float, kind: TableType) -> torch.Tensor:
    """float32 [length, D]: D/2 cosines, then D/2 sines."""
    frequencies = [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    rows = [
        [function(position * frequency) for function in (math.cos, math.sin) for frequency in frequencies]
        for position in range(length)
    ]
    table = torch.tensor(rows, dtype=torch.float64).float()
    return table.bfloat16().float() if kind is TableType.BF16 else table
