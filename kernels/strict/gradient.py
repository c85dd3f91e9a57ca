"""A function computed in one way and differentiated as another: the strict forward with the usual backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Function = Callable[..., torch.Tensor]


def with_gradient_of(usual: Function, strict: Function, *operands: torch.Tensor) -> torch.Tensor:
    """strict(*operands), whose gradient is that of usual(*operands) at the same operands.

    Both return one tensor of the same shape and type. Nothing but the operands is kept: backward computes `usual` anew.
    """
    if torch.is_grad_enabled() and any(operand.requires_grad for operand in operands):
        return _GradientOf.apply(usual, strict, *operands)
    return strict(*operands)


class _GradientOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, usual: Function, strict: Function, *operands: torch.Tensor) -> torch.Tensor:
        ctx.usual = usual
        ctx.save_for_backward(*operands)
        return strict(*operands)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        with torch.enable_grad():
            operands = [
                t.detach().requires_grad_(wanted) for t, wanted in zip(ctx.saved_tensors, needed, strict=True)
            ]
            output = ctx.usual(*operands)
        wanted = [operand for operand in operands if operand.requires_grad]
        found = iter(torch.autograd.grad(output, wanted, grads[0]))
        return None, None, *(next(found) if need else None for need in needed)
