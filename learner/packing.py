"""Sequences of different lengths one after another, without padding between them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


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
        return padded[self.sequences, self.positions]

    def unpack(self, packed: torch.Tensor, padding: float = 0) -> torch.Tensor:
        """[T, ...] -> [B, longest, ...], with `padding` behind each sequence."""
        padded = packed.new_full((len(self.lengths), self.longest, *packed.shape[1:]), padding)
        return padded.index_put((self.sequences, self.positions), packed)

    def before(self, mask: torch.Tensor) -> torch.Tensor:
        """bool [B, S] -> int64: the packed place of the token ahead of each token in `mask`, row after row. No sequence
        may begin with one."""
        return self.pack(mask).nonzero().squeeze(1) - 1
