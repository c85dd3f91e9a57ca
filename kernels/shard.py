"""The part of a tensor that one of several processes holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch


@dataclass(frozen=True)
class Shard:
    """Indices `start` to `start + length` of dimension `dim`, in which the whole tensor has `size`."""

    dim: int
    start: int
    length: int
    size: int

    @classmethod
    def even(cls, dim: int, size: int, rank: int, ranks: int) -> Shard:
        """Part number `rank` of `ranks` equal ones. Raises ValueError where there are none."""
        if size % ranks:
            raise ValueError(f"{size} cannot be cut into {ranks} equal parts")
        return cls(dim, rank * (size // ranks), size // ranks, size)

    def times(self, each: int) -> Shard:
        """The same part where every index stands for `each` of them."""
        return Shard(self.dim, self.start * each, self.length * each, self.size * each)

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """A view of this part. Raises ValueError for a tensor of another size."""
        if whole.dim() <= self.dim or whole.shape[self.dim] != self.size:
            raise ValueError(f"{self} is no part of a tensor {tuple(whole.shape)}")
        return whole.narrow(self.dim, self.start, self.length)

    def whole(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the whole from that of this part."""
        return (*shape[: self.dim], self.size, *shape[self.dim + 1 :])


Shards = Mapping[str, Shard]  # by names on the wire; what is held whole has none
NO_SHARDS: Shards = MappingProxyType({})
