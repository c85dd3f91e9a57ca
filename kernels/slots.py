"""An expert layer whose slots are computed elsewhere: what expert parallelism needs of a spec.

Every slot (a token and one of its experts) becomes a token of its own with one expert. Whoever owns that expert
computes the slot by the layer of `slot_spec`, with the coefficient `slot_coefficients` says; the token's owner takes
the rows back and combines them. Each value passes through the same operations and roundings as in the whole layer
under `spec`, forward and backward:

    rows = spread(x, k, spec)                           [T*k, H], slot t*k + j is token t
    rows = layer(rows, ids, slot_coefficients, ...)     under slot_spec(spec), wherever the expert is
    y = gather(rows, ids, topk_weights, spec)           [T, H]

A scale over the whole tensor (`ScaleDomain.TENSOR`) is then over the rows that reach one owner.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from kernels.combine import combine_slots, sum_slots
from kernels.spec import Combine, ExecutionSpec, FloatType, RouterPosition
from kernels.swiglu import cast_coefficients


def slot_spec(spec: ExecutionSpec) -> ExecutionSpec:
    """Of a layer that gives FC2 rows as they are: one expert a token, nothing rounded after FC2."""
    own = replace(spec, combine=Combine.SLOT_ORDER, combine_sum=FloatType.FP32, output=spec.fc2_output)
    if spec.router_position is not RouterPosition.FC2_OUTPUT:
        return own
    # The coefficient is multiplied in `gather`, and is 1 before.
    return replace(own, router_coefficient=FloatType.FP32, router_product=FloatType.FP32)


def slot_coefficients(topk_weights: torch.Tensor, spec: ExecutionSpec) -> torch.Tensor:
    """float32 [T, k] -> [T*k, 1]: the coefficients themselves where the spec multiplies them ahead of FC2, else 1."""
    after_fc2 = spec.router_position is RouterPosition.FC2_OUTPUT
    return (torch.ones_like(topk_weights) if after_fc2 else topk_weights).reshape(-1, 1)


def spread(x: torch.Tensor, top_k: int, spec: ExecutionSpec) -> torch.Tensor:
    """[T, H] -> [T*k, H] as `widened`. The gradient is summed over a token's slots in slot order and FP32."""
    return _Spread.apply(widened(x, spec), top_k)


def widened(x: torch.Tensor, spec: ExecutionSpec) -> torch.Tensor:
    """x in the type that rows of slots have: float32 where the spec keeps more of a row than the type of x would."""
    return x.float() if FloatType.FP32 in (spec.operand, spec.fc2_output) else x


def gather(
    rows: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, spec: ExecutionSpec
) -> torch.Tensor:
    """[T*k, H] -> [T, H] in the type of `rows`, by `kernels.combine` under `spec`. Differentiable in rows and, where
    the spec multiplies them here, in topk_weights float32 [T, k]. topk_ids: int64 [T, k].
    """
    return _Gather.apply(rows, topk_ids, topk_weights, spec)


def collect(
    rows: torch.Tensor,
    row_of_slot: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    spec: ExecutionSpec,
) -> torch.Tensor:
    """As `gather`, without gradient and in `spec.output`, of rows [T*k, H] in another order: row_of_slot, int64 [T, k],
    says which is whose.
    """
    slots = rows.index_select(0, row_of_slot.flatten()).view(*row_of_slot.shape, rows.shape[1])
    return combine_slots(slots, lambda: topk_ids.argsort(dim=-1, stable=True), topk_weights, spec)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, top_k: int) -> torch.Tensor:
        ctx.top_k = top_k
        return x.repeat_interleave(top_k, dim=0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (d_rows,) = gradients
        return sum_slots(d_rows.unflatten(0, (-1, ctx.top_k))).to(d_rows.dtype), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, spec: ExecutionSpec
    ) -> torch.Tensor:
        slots = rows.view(*topk_ids.shape, rows.shape[1])
        ctx.after_fc2 = spec.router_position is RouterPosition.FC2_OUTPUT
        ctx.spec, ctx.dtype = spec, rows.dtype
        ctx.save_for_backward(slots if ctx.after_fc2 else None, topk_weights)
        combined = combine_slots(slots, lambda: topk_ids.argsort(dim=-1, stable=True), topk_weights, spec)
        return combined.to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        slots, topk_weights = ctx.saved_tensors
        d_output = gradients[0].float()[:, None]
        if not ctx.after_fc2:
            d_rows = d_output.expand(-1, topk_weights.shape[1], -1)
            return d_rows.flatten(0, 1).to(ctx.dtype), None, None, None
        d_rows = cast_coefficients(topk_weights, ctx.spec)[..., None] * d_output
        d_weights = (slots.float() * d_output).sum(-1)
        return d_rows.flatten(0, 1).to(ctx.dtype), None, d_weights, None
