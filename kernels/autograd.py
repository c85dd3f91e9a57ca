"""The expert layer as a differentiable function.

Forward is `kernels.reference` under the spec. Backward takes quantisation as the identity (straight-through,
Bengio et al., 2013, arXiv:1308.3432) and differentiates the layer at the operands as they were before
quantisation, in the spec's operand type T (BF16; FP32 under `fp32`), with products summed in FP32. For one
slot, with its coefficient p and dY the gradient of the layer's output:

    d_row = T(p * dY)         d_p   = sum(dY * row)             row is the FC2 output
    d_act = T(d_row @ W2)     d_W2  = sum over rows of d_row^T act
    d_fc1 = T(swiglu'(fc1) * d_act)   in FP32
    d_W13 = sum over rows of d_fc1^T x
    d_x   = sum over slots, in slot order and FP32, of T(d_fc1 @ W13)
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from kernels.experts import TORCH_TYPE
from kernels.reference import PreparedExperts, check_inputs, combine, expert_rows
from kernels.routing import Routing, sum_in_slot_order
from kernels.spec import ExecutionSpec


def expert_layer(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    prepared: PreparedExperts,
    spec: ExecutionSpec,
) -> torch.Tensor:
    """The layer's output [T, H] in x.dtype, differentiable in x, topk_weights, w13 and w2.

    x: [T, H]; topk_ids: integer [T, k]; topk_weights: float32 [T, k]; w13 [E, 2F, H] and w2 [E, H, F]: the
    master weights, BF16 or FP32, of which `prepared` is the version under `spec`. Forward reads `prepared`
    only, backward the masters only, so they must not change between the two (autograd then raises
    RuntimeError). Raises ValueError as `kernels.reference.forward` does, and for masters of other shapes than
    `prepared`.
    """
    check_inputs(x, topk_ids, topk_weights, prepared, spec)
    for name, master, matrix in (("w13", w13, prepared.w13), ("w2", w2, prepared.w2)):
        if master.shape != matrix.elements.shape:
            expected = tuple(matrix.elements.shape)
            raise ValueError(f"{name} must be {expected} as it was prepared, got {tuple(master.shape)}")
    return _ExpertLayer.apply(x, topk_ids, topk_weights, w13, w2, prepared)


class _ExpertLayer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
        prepared: PreparedExperts,
    ) -> torch.Tensor:
        spec = prepared.spec
        routing = Routing.group(topk_ids, w13.shape[0])
        operand = x.to(TORCH_TYPE[spec.operand])
        rows = expert_rows(operand, routing, prepared)
        # The masters are kept by reference and cast again in backward: a BF16 copy of them would cost memory.
        ctx.save_for_backward(operand, topk_weights, w13, w2, rows.fc1, rows.swiglu, rows.fc2)
        ctx.routing = routing
        ctx.input_type = x.dtype
        return combine(rows.fc2, routing, topk_weights, spec).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator hides parameter names
        ctx: Any, *grad_outputs: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        x, topk_weights, w13, w2, fc1, act, fc2 = ctx.saved_tensors
        routing: Routing = ctx.routing
        tokens = routing.tokens
        grad_output = grad_outputs[0].float()
        coefficients = topk_weights.flatten()[routing.order]
        d_rows = (coefficients[:, None] * grad_output[tokens]).to(x.dtype)
        d_x_rows = torch.empty_like(d_rows)
        d_w13, d_w2 = torch.zeros_like(w13), torch.zeros_like(w2)
        for expert, own in routing.occupied():
            d_row = d_rows[own].float()
            d_act = (d_row @ _widen(w2[expert], x.dtype)).to(x.dtype)
            d_fc1 = _swiglu_backward(fc1[own].float(), d_act.float()).to(x.dtype).float()
            d_x_rows[own] = (d_fc1 @ _widen(w13[expert], x.dtype)).to(x.dtype)
            d_w2[expert] = d_row.T @ act[own].float()
            d_w13[expert] = d_fc1.T @ x[tokens[own]].float()
        d_x = sum_in_slot_order(routing.by_token(d_x_rows)).to(ctx.input_type)
        d_topk_weights = (routing.by_token(fc2).float() * grad_output[:, None]).sum(-1)
        return d_x, None, d_topk_weights, d_w13, d_w2, None


def _widen(weight: torch.Tensor, operand: torch.dtype) -> torch.Tensor:
    """A master weight rounded to the operand type, as float32 for the product."""
    return weight.to(operand).float()


def _swiglu_backward(fc1: torch.Tensor, d_act: torch.Tensor) -> torch.Tensor:
    """float32 [R, 2F], [R, F] -> gradient [R, 2F] of silu(gate) * up."""
    gate, up = fc1.chunk(2, dim=-1)
    sigmoid = torch.sigmoid(gate)
    d_gate = d_act * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat((d_gate, d_act * gate * sigmoid), dim=-1)
