"""A token's expert outputs, weighted and summed into the layer's output, as `Combine` says."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.experts import TORCH_TYPE
from kernels.routing import Routing
from kernels.spec import Combine, ExecutionSpec, FloatType, RouterPosition
from kernels.swiglu import cast_coefficients, router_product


def combine(
    fc2: torch.Tensor, routing: Routing, topk_weights: torch.Tensor, spec: ExecutionSpec
) -> torch.Tensor:
    """Grouped FC2 rows [T*k, H] and float32 [T, k] -> [T, H] in `spec.output`, cast once.

    Coefficients that the spec multiplies ahead of FC2 are in the rows already.
    """
    return combine_slots(routing.by_token(fc2), routing.expert_order, topk_weights, spec)


def combine_slots(
    slots: torch.Tensor,
    expert_order: Callable[[], torch.Tensor],
    topk_weights: torch.Tensor,
    spec: ExecutionSpec,
) -> torch.Tensor:
    """As `combine`, of FC2 rows [T, k, H]; expert_order: gives `Routing.expert_order`, where the spec needs it."""
    coefficients = cast_coefficients(topk_weights, spec)
    if spec.combine is Combine.EXPERT_ORDER:
        order = expert_order()
        slots = slots.take_along_dim(order[:, :, None], 1)
        coefficients = coefficients.gather(1, order)
    if spec.combine is Combine.SLOT_ORDER_FMA:
        total = _fma_chain(slots.float(), coefficients)
    else:
        if spec.router_position is RouterPosition.FC2_OUTPUT:
            slots = router_product(slots, coefficients[:, :, None], spec)
        total = sum_slots(slots, spec.combine_sum)
    return total.to(TORCH_TYPE[spec.output])


def sum_slots(slots: torch.Tensor, sum_type: FloatType = FloatType.FP32) -> torch.Tensor:
    """[T, k, N] -> float32 [T, N]: (y0 + y1) + ..., from zero, every addition in FP32 and rounded to `sum_type`."""
    rounded = TORCH_TYPE[sum_type]
    total = slots[:, 0].to(rounded).float()
    for position in range(1, slots.shape[1]):
        total = (total + slots[:, position].float()).to(rounded).float()
    return total


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """float32, shapes that broadcast -> a * b + c rounded once to float32, as IEEE 754's fusedMultiplyAdd.

    The product is exact in FP64. The sum is rounded there to odd, which keeps the second rounding, to FP32, right:
    53 bits are two more than FP32's 24 (Boldo and Melquiond, 2008, "Emulation of FMA and correctly rounded sums").
    """
    product, addend = torch.broadcast_tensors(a.double() * b.double(), c.double())
    total = product + addend
    # What the sum lost, exactly (Knuth's two-sum).
    virtual = total - product
    error = (product - (total - virtual)) + (addend - virtual)
    bits = total.view(torch.int64)
    inexact_to_even = (error != 0) & (bits & 1 == 0) & total.isfinite()
    away_from_zero = (error > 0) == (total > 0)
    step = torch.where(away_from_zero, 1, -1)
    return (bits + step * inexact_to_even).view(torch.float64).float()


def _fma_chain(slots: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
    total = coefficients[:, 0, None] * slots[:, 0]
    for position in range(1, slots.shape[1]):
        total = fma(coefficients[:, position, None], slots[:, position], total)
    return total
