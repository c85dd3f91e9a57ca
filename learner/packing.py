"""Sequences of different lengths one after another, without padding between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable


@dataclass(frozen=True, eq=False)
class Packing:
    """Where the T tokens of B right-padded sequences stand once padding is left out.

    lengths: int64 [B]; sequences, positions: int64 [T], the sequence of each token and its place in that; longest:
    the largest length.
    """

    lengths: torch.Tensor
    sequences: torch.Tensor
    positions: torch.Tensor
    longest: int

    @classmethod
    def of(cls, lengths: torch.Tensor) -> Packing:
        """lengths: int64 [B], each at least 1."""
        sequences = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
        starts = lengths.cumsum(0) - lengths
        positions = torch.arange(len(sequences), device=lengths.device) - starts[sequences]
        return cls(lengths, sequences, positions, int(lengths.max()))

    def pack(self, padded: torch.Tensor) -> torch.Tensor:
        """[B, S, ...] -> [T, ...]"""
        width = padded.shape[1]
        return _Rearranged.apply(padded.flatten(0, 1), self._places(width), self._tokens(width), 0)

    def unpack(self, packed: torch.Tensor, padding: float = 0) -> torch.Tensor:
        """[T, ...] -> [B, longest, ...], with `padding` behind each sequence."""
        width = self.longest
        rows = _Rearranged.apply(packed, self._tokens(width), self._places(width), padding)
        return rows.unflatten(0, (len(self.lengths), width))

    def _places(self, width: int) -> torch.Tensor:
        """int64 [T], of each token: its place in rows of `width`."""
        return self.sequences * width + self.positions

    def _tokens(self, width: int) -> torch.Tensor:
        """int64 [B * width], of each place in such rows: its token; negative for padding."""
        position = torch.arange(width, device=self.lengths.device)
        starts = (self.lengths.cumsum(0) - self.lengths)[:, None]
        return torch.where(position < self.lengths[:, None], starts + position, -1).flatten()

    def before(self, mask: torch.Tensor) -> torch.Tensor:
        """bool [B, S] -> int64: the packed place of the token ahead of each token in `mask`, row after row. No sequence
        may begin with one."""
        return self.pack(mask).nonzero().squeeze(1) - 1

    def states_before(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """hidden [>= T, H] -> its rows at `before(mask)`."""
        chosen = F.pad(self.pack(mask)[1:], (0, len(hidden) - len(self.sequences) + 1))
        inverse = torch.where(chosen, chosen.cumsum(0) - 1, -1)
        return _Rearranged.apply(hidden, self.before(mask), inverse, 0)


class _Rearranged(torch.autograd.Function):
    """rows[index], `padding` where the index is negative. inverse: where each row went, negative for nowhere, so that
    the gradient is read, too: that of indexing in general is added up, by a sort where it must be deterministic.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, index: torch.Tensor, inverse: torch.Tensor, padding: float
    ) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        return _read(rows, index, padding)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (inverse,) = ctx.saved_tensors
        return _read(gradients[0], inverse, 0), None, None, None


def _read(rows: torch.Tensor, index: torch.Tensor, padding: float) -> torch.Tensor:
    if not len(rows):
        return rows.new_full((len(index), *rows.shape[1:]), padding)
    found = rows.index_select(0, index.clamp(min=0))
    return found.masked_fill_((index < 0).view(-1, *(1,) * (rows.dim() - 1)), padding)
