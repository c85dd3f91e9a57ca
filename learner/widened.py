"""The product of BF16 matrices with an FP32 result, on tensor cores.

The product of two BF16 numbers is an FP32 number, and tensor cores sum in FP32: the result is that of the widened
matrices up to the order of sums, many times faster than FP32's own units have it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable


def widened_product(a: torch.Tensor, weight: torch.Tensor, narrow: torch.Tensor | None) -> torch.Tensor:
    """a [N, H] of any float type, weight float32 [V, H] -> float32 [N, V], a widened times weight transposed.

    narrow: `weight` before it was widened, if that was BF16; where `a` is BF16 too, the two are multiplied on a GPU's
    tensor cores. The gradient goes to `weight`, in FP32. There the incoming gradient is split into two BF16 terms,
    which leaves out at most 2^-16 of each element.
    """
    if narrow is None or a.dtype is not torch.bfloat16 or not a.is_cuda:
        return a.float() @ weight.T
    return _Product.apply(a, weight, narrow)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, weight: torch.Tensor, narrow: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, narrow)
        return fp32_product(a, narrow.T)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        a, narrow = ctx.saved_tensors
        [gradient] = gradients
        high = gradient.bfloat16()
        low = (gradient - high).bfloat16()
        of_a = fp32_product(high, narrow).add_(fp32_product(low, narrow))
        of_weight = fp32_product(high.T, a).add_(fp32_product(low.T, a))
        return of_a.to(a.dtype), of_weight, None


def fp32_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """bfloat16 [N, K], [K, M] -> float32 [N, M]"""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()
