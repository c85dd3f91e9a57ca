"""The expert layer as a differentiable function.

Forward is `kernels.reference` under the spec. Backward takes quantisation, casts and rounded products as the
identity (straight-through, Bengio et al., 2013, arXiv:1308.3432), at the forward's own FC1 outputs. With T() the
cast to the spec's operand type, dY the gradient of the layer's output, and p a slot's coefficient, multiplied after
FC2:

    d_row = T(p * dY)             d_p = sum(dY * row)           row is the FC2 output
    d_act = T(d_row @ W2)         d_W2 = sum over rows of d_row^T act
    d_fc1 = T(swiglu'(fc1) * d_act)   in FP32
    d_W13 = sum over rows of d_fc1^T x
    d_x   = sum over slots, in slot order and FP32, of T(d_fc1 @ W13)

Multiplied ahead of FC2, with h = silu(gate) * up and act = p * h:

    d_row = T(dY)                 d_act = T(d_row @ W2)
    d_p   = sum(d_act * h)        d_h = p * d_act in FP32, to swiglu' in place of d_act

(h is the cast value where p multiplies that.) Products and their operands: `kernels.backward`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from kernels.backward import GradientProducts
from kernels.combine import combine, sum_slots
from kernels.experts import TORCH_TYPE
from kernels.guard import NonFiniteGuard, Operand
from kernels.quantizer_spec import Rounding
from kernels.reference import PreparedExperts, check_inputs, expert_rows
from kernels.routing import Routing
from kernels.spec import ExecutionSpec, RouterPosition
from kernels.swiglu import cast_coefficients, swiglu, swiglu_backward


def expert_layer(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    prepared: PreparedExperts,
    spec: ExecutionSpec,
    *,
    guard: NonFiniteGuard | None = None,
    seed: int | None = None,
) -> torch.Tensor:
    """The layer's output [T, H] in x.dtype, differentiable in x, topk_weights, w13 and w2.

    x: [T, H]; topk_ids: integer [T, k]; topk_weights: float32 [T, k]; w13 [E, 2F, H] and w2 [E, H, F]: the
    master weights, BF16 or FP32, of which `prepared` is the version under `spec`. Forward reads `prepared` only.
    Backward reads the masters (except under `dequantized`), so they must not change between the two (autograd then
    raises RuntimeError). guard: as in `kernels.reference.forward`, for the gradient's operands too. seed: of
    stochastic rounding in backward, which is a function of it.

    Raises ValueError as `kernels.reference.forward` does, for masters of other shapes than `prepared`, and for a
    seed that is missing when a gradient is to be rounded stochastically.
    """
    check_inputs(x, topk_ids, topk_weights, prepared, spec)
    for name, master, matrix in (("w13", w13, prepared.w13), ("w2", w2, prepared.w2)):
        if master.shape != matrix.elements.shape:
            expected = tuple(matrix.elements.shape)
            raise ValueError(f"{name} must be {expected} as it was prepared, got {tuple(master.shape)}")
    stochastic = spec.gradient is not None and spec.gradient.rounding is Rounding.STOCHASTIC
    needed = torch.is_grad_enabled() and any(t.requires_grad for t in (x, topk_weights, w13, w2))
    if stochastic and needed and seed is None:
        raise ValueError(f"{spec.name!r} rounds gradients stochastically and needs a seed")
    products = GradientProducts(spec, seed, guard)
    return _ExpertLayer.apply(x, topk_ids, topk_weights, w13, w2, prepared, products)


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
        products: GradientProducts,
    ) -> torch.Tensor:
        spec = prepared.spec
        routing = Routing.group(topk_ids, w13.shape[0])
        operand = x.to(TORCH_TYPE[spec.operand])
        rows = expert_rows(operand, routing, prepared, topk_weights, products.guard)
        # The masters are kept by reference and cast again in backward: a BF16 copy of them would cost memory.
        fc2 = rows.fc2 if spec.router_position is RouterPosition.FC2_OUTPUT else None
        ctx.save_for_backward(operand, topk_weights, w13, w2, rows.fc1, rows.swiglu, fc2)
        ctx.routing, ctx.prepared, ctx.products = routing, prepared, products
        ctx.input_type = x.dtype
        return combine(rows.fc2, routing, topk_weights, spec).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator hides parameter names
        ctx: Any, *grad_outputs: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        x, topk_weights, w13, w2, fc1, act, fc2 = ctx.saved_tensors
        routing: Routing = ctx.routing
        prepared: PreparedExperts = ctx.prepared
        products: GradientProducts = ctx.products
        spec, tokens = prepared.spec, routing.tokens
        kind = TORCH_TYPE[spec.operand]
        d_output = grad_outputs[0].float()
        coefficients = cast_coefficients(topk_weights, spec).flatten()[routing.order, None]

        after_fc2 = spec.router_position is RouterPosition.FC2_OUTPUT
        d_rows = (coefficients * d_output[tokens] if after_fc2 else d_output[tokens]).to(kind)
        fc1_inputs = products.activations(x, tokens, routing, Operand.FC1_INPUT)
        fc2_inputs = products.activations(act, None, routing, Operand.FC2_INPUT)
        d_x_rows = torch.empty_like(d_rows)
        d_coefficients = torch.zeros_like(coefficients)  # stays zero when the router comes after FC2
        d_w13, d_w2 = torch.zeros_like(w13), torch.zeros_like(w2)
        for expert, own in routing.occupied():
            d_row = d_rows[own]
            d_act = (
                products.dgrad(d_row, products.weight(w2, prepared.w2, expert), expert, "FC2")
                .to(kind)
                .float()
            )
            if not after_fc2:
                d_coefficients[own] = (d_act * _unweighted(fc1[own], spec)).sum(-1, keepdim=True)
                d_act = coefficients[own] * d_act
            d_fc1 = swiglu_backward(fc1[own].float(), d_act).to(kind)
            d_x = products.dgrad(d_fc1, products.weight(w13, prepared.w13, expert), expert, "FC1")
            d_x_rows[own] = d_x.to(kind)
            d_w2[expert] = products.wgrad(d_row, fc2_inputs(own), expert, "FC2")
            d_w13[expert] = products.wgrad(d_fc1, fc1_inputs(own), expert, "FC1")
        if after_fc2:
            d_topk_weights = (routing.by_token(fc2).float() * d_output[:, None]).sum(-1)
        else:
            d_topk_weights = routing.by_token(d_coefficients).squeeze(-1)
        d_tokens = sum_slots(routing.by_token(d_x_rows)).to(ctx.input_type)
        return d_tokens, None, d_topk_weights, d_w13, d_w2, None, None


def _unweighted(fc1: torch.Tensor, spec: ExecutionSpec) -> torch.Tensor:
    """float32 [R, F]: what the router coefficient multiplied."""
    act = swiglu(fc1, spec)
    if spec.router_position is RouterPosition.SWIGLU_OUTPUT:
        act = act.to(TORCH_TYPE[spec.swiglu_output]).float()
    return act
