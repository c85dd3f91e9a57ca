"""Rows read in another order, with a gradient that is read as well."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable


def rearrange(
    rows: torch.Tensor, index: torch.Tensor, inverse: torch.Tensor, padding: float = 0
) -> torch.Tensor:
    """rows[index], `padding` where the index is negative; index and inverse: int64.

    Every row is read at most once. inverse: where each row went, negative for nowhere. The gradient of indexing in
    general is added up, by a sort where it must be deterministic.
    """
    return _Rearranged.apply(rows, index, inverse, padding)


class _Rearranged(torch.autograd.Function):
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
