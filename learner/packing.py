"""Sequences of different lengths one after another, without padding between them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from learner.batch import moved
from learner.rearrange import rearrange

if TYPE_CHECKING:
    from kernels.triton.outside.attention_blocks import Blocks


@dataclass(frozen=True, eq=False)
class Packing:
    """Where the T tokens of B right-padded sequences stand once padding is left out.

    lengths: int64 [B]; sequences, positions: int64 [T], the sequence of each token and its place in that; sizes: the
    lengths, where nothing waits for a device to read them.
    """

    lengths: torch.Tensor
    sequences: torch.Tensor
    positions: torch.Tensor
    sizes: tuple[int, ...]
    _known: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(cls, lengths: torch.Tensor, device: torch.device | str = "cpu") -> Packing:
        """lengths: int64 [B], each at least 1, on the CPU, so that nothing waits for the device to which they go."""
        sizes = tuple(lengths.tolist())
        lengths = moved(lengths, torch.device(device))
        sequences = torch.arange(len(lengths), device=device).repeat_interleave(
            lengths, output_size=sum(sizes)
        )
        starts = lengths.cumsum(0) - lengths
        positions = torch.arange(len(sequences), device=device) - starts[sequences]
        return cls(lengths, sequences, positions, sizes)

    @property
    def longest(self) -> int:
        return max(self.sizes)

    @cached_property
    def alike(self) -> list[tuple[slice, Packing]]:
        """Runs of neighbouring sequences, each with the packed tokens that it is: padded, a run has at most twice its
        tokens.
        """
        runs, first, start = [], 0, 0
        while first < len(self.sizes):
            count, most, tokens = 0, 0, 0
            for size in self.sizes[first:]:
                if max(most, size) * (count + 1) > 2 * (tokens + size):
                    break
                count, most, tokens = count + 1, max(most, size), tokens + size
            runs.append((slice(start, start + tokens), self.sizes[first : first + count]))
            first, start = first + count, start + tokens
        if len(runs) == 1:
            return [(runs[0][0], self)]
        device = self.lengths.device
        return [(own, Packing.of(torch.tensor(sizes), device)) for own, sizes in runs]

    @cached_property
    def bounds(self) -> torch.Tensor:
        """int32 [B + 1]: sequence b is tokens bounds[b] to bounds[b + 1]."""
        return F.pad(self.lengths.cumsum(0), (1, 0)).int()

    @cached_property
    def blocks(self) -> Blocks:
        """What the attention kernels share between layers."""
        from kernels.triton.outside.attention_blocks import Blocks  # needs Triton

        return Blocks(self.bounds, self.longest, len(self.sequences))

    def pack(self, padded: torch.Tensor) -> torch.Tensor:
        """[B, S, ...] -> [T, ...]"""
        places, tokens = self._moves(padded.shape[1])
        return rearrange(padded.flatten(0, 1), places, tokens)

    def unpack(self, packed: torch.Tensor, padding: float = 0) -> torch.Tensor:
        """[T, ...] -> [B, longest, ...], with `padding` behind each sequence."""
        places, tokens = self._moves(self.longest)
        rows = rearrange(packed, tokens, places, padding)
        return rows.unflatten(0, (len(self.lengths), self.longest))

    def _moves(self, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [T], of each token its place in rows of `width`; int64 [B * width], of each such place its token,
        negative for padding. Made once: every layer asks.
        """
        if width not in self._known:
            position = torch.arange(width, device=self.lengths.device)
            starts = (self.lengths.cumsum(0) - self.lengths)[:, None]
            tokens = torch.where(position < self.lengths[:, None], starts + position, -1).flatten()
            self._known[width] = self.sequences * width + self.positions, tokens
        return self._known[width]

    def before(self, mask: torch.Tensor) -> torch.Tensor:
        """bool [B, S] -> int64: the packed place of the token ahead of each token in `mask`, row after row. No sequence
        may begin with one."""
        return self.pack(mask).nonzero().squeeze(1) - 1

    def states_before(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """hidden [>= T, H] -> its rows at `before(mask)`."""
        chosen = F.pad(self.pack(mask)[1:], (0, len(hidden) - len(self.sequences) + 1))
        inverse = torch.where(chosen, chosen.cumsum(0) - 1, -1)
        return rearrange(hidden, self.before(mask), inverse)
