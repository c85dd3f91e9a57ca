"""Rotary positions as Megatron computes them: its angles, its formula, its roundings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from learner.megatron_api import RotaryEmbedding


@dataclass(frozen=True, eq=False)
class Rotary:
    """cosines, sines: [T, D/2] in the type of the model, of each token's position."""

    cosines: torch.Tensor
    sines: torch.Tensor


class RotaryAngles(RotaryEmbedding):
    """Cosines and sines of positions, on the device of the model; Megatron's own moves angles to a GPU."""

    _tables: tuple[torch.Tensor, torch.Tensor] | None = None

    def at(self, positions: torch.Tensor, longest: int, dtype: torch.dtype) -> Rotary:
        """positions: int64 [T], each less than `longest`."""
        tables = self._tables
        if tables is None or len(tables[0]) < longest or tables[0].device != positions.device:
            known = 1 << (longest - 1).bit_length()  # an angle does not depend on how many there are
            angles = self.get_freqs_non_repeated(known).to(positions.device)
            self._tables = tables = angles.cos(), angles.sin()
        cosines, sines = (table.index_select(0, positions).to(dtype) for table in tables)
        return Rotary(cosines, sines)


def rotate(x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """[T, heads, D] -> the same: x * cos + rotate_half(x) * sin, each product rounded (Su et al. 2021, arXiv
    2104.09864). BF16 on a GPU takes one kernel, with the same bits.
    """
    half = x.shape[2] // 2
    if x.is_cuda and x.dtype is torch.bfloat16 and not half & (half - 1):
        return _Rotated.apply(x, rotary.cosines, rotary.sines)
    cosines, sines = (table.repeat(1, 2).unsqueeze(1) for table in (rotary.cosines, rotary.sines))
    first, second = x.chunk(2, dim=-1)
    return x * cosines + torch.cat((-second, first), dim=-1) * sines


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        from kernels.triton.outside.rotary import rotate as kernel  # needs a GPU

        ctx.save_for_backward(cosines, sines)
        return kernel(x, cosines, sines)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        from kernels.triton.outside.rotary import rotate as kernel

        return kernel(gradients[0], *ctx.saved_tensors, back=True), None, None
