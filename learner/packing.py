"""Sequences of different lengths one after another, without padding between them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from learner.rearrange import rearrange


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
        return rearrange(padded.flatten(0, 1), self._places(width), self._tokens(width))

    def unpack(self, packed: torch.Tensor, padding: float = 0) -> torch.Tensor:
        """[T, ...] -> [B, longest, ...], with `padding` behind each sequence."""
        width = self.longest
        rows = rearrange(packed, self._tokens(width), self._places(width), padding)
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
        return rearrange(hidden, self.before(mask), inverse)
