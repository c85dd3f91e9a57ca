"""The expert layer with one scale for all of an expert's rows, composed naively: `te_per_tensor` and `te_exact`.

    group slots -> permute -> A, quantise -> FC1 -> SwiGLU -> times p -> A, quantise -> FC2 -> sum over the slots

Every step but the two products computes the reference's bits; the products sum along K in FP32 in the tensor core's
order. A token's output depends on the tokens that share its batch, because its scales do: that is the spec's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from kernels.catalogue import named_spec
from kernels.experts import ExpertWeights
from kernels.grouped import inverse_divisors
from kernels.guard import NonFiniteGuard, Operand
from kernels.probe import Shown, listened_to, show
from kernels.quantize import QuantizedTensor
from kernels.quantizer_spec import Rounding
from kernels.spec import Backward, ExecutionSpec
from kernels.triton import per_tensor
from kernels.triton.combine import combine
from kernels.triton.grouped_gemm import grouped_gemm
from kernels.triton.grouping import ALIGN, ExpertGroups, group
from kernels.triton.layer import check_ids, check_inputs, check_masters, needs_gradient
from kernels.triton.matrix import ExpertMatrix
from kernels.triton.operand import GroupedOperand
from kernels.triton.ops import show_rows
from kernels.triton.per_tensor_backward import Products, Saved, expert_gradients, weigh
from kernels.triton.permute import permute
from kernels.triton.support import difference
from kernels.triton.swiglu import swiglu

_COMPUTED = named_spec("te_per_tensor")
_SUM = named_spec("minite")  # its combination, with coefficients of 1, is the plain sum in slot order


@dataclass(frozen=True, eq=False)
class TensorScaledMatrix:
    """A weight [E, N, K] with one outer scale an expert."""

    product: ExpertMatrix  # with outer scales of 1
    amax: torch.Tensor  # float32 [E]: A

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.product.shape

    def derived(self) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in self.product.derived().items() if name != "outer"}


@dataclass(frozen=True, eq=False)
class PreparedExperts:
    """One version of a layer's expert weights as the kernels read them under `spec`."""

    spec: ExecutionSpec
    w13: TensorScaledMatrix  # [E, 2F, H]
    w2: TensorScaledMatrix  # [E, H, F]
    products: Products  # of the gradient

    def derived(self) -> dict[str, torch.Tensor]:
        """As `kernels.reference.PreparedExperts.derived`."""
        parts = {"w13": self.w13.derived(), "w2": self.w2.derived()}
        return {f"{name}.{part}": tensor for name, own in parts.items() for part, tensor in own.items()}


def check_spec(spec: ExecutionSpec) -> None:
    """Raises ValueError, naming the field, for a spec that is not computed here: the gradient's products are in BF16
    from saved BF16 operands, or quantised as `te_per_tensor` says, rounded stochastically or to nearest.
    """
    left_out = ["name"]
    if spec.backward is Backward.BF16_STRAIGHT_THROUGH:
        left_out += ["backward", "gradient"]
    elif spec.gradient is not None:
        spec = replace(spec, gradient=replace(spec.gradient, rounding=Rounding.STOCHASTIC))
    problem = difference(spec, _COMPUTED, left_out)
    if problem is not None:
        raise ValueError(f"the per-tensor Triton layer does not compute {spec.name!r}: {problem}")


def quantize(w13: torch.Tensor, w2: torch.Tensor, spec: ExecutionSpec) -> ExpertWeights:
    """As `ExpertWeights.quantize`, the same bytes."""
    check_spec(spec)
    return ExpertWeights.quantize(w13, w2, spec, lambda weight, _, halves: per_tensor.quantize_weight(weight))


def prepare(weights: ExpertWeights, spec: ExecutionSpec, *, compact: bool = False) -> PreparedExperts:
    """compact: as in `kernels.triton.layer`. Raises ValueError when they were stored under a spec of another layout,
    and for a spec that is not computed here.
    """
    check_spec(spec)
    weights = ExpertWeights.from_tensors(weights.tensors(), spec)
    matrices = []
    for matrix in (weights.w13, weights.w2):
        assert isinstance(matrix, QuantizedTensor) and matrix.outer_scales is not None
        ones = torch.ones_like(matrix.outer_scales)
        product = ExpertMatrix.of(replace(matrix, outer_scales=ones), native=False, compact=compact)
        matrices.append(TensorScaledMatrix(product, matrix.outer_scales[:, 0]))
    w13, w2 = matrices
    return PreparedExperts(spec, w13, w2, Products(spec))


def forward(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    prepared: PreparedExperts,
    spec: ExecutionSpec,
    guard: NonFiniteGuard | None = None,
) -> torch.Tensor:
    """As `kernels.reference.forward`: the layer's output, bfloat16 [T, H]. The spec's quantisers refuse nothing: NaN
    and infinities saturate.

    With a guard nothing waits for the device, and expert ids are not checked: a slot whose id does not exist makes its
    token's output NaN. Without one, such ids raise ValueError.
    """
    check_inputs(x, topk_ids, topk_weights, prepared, spec)
    check_ids(topk_ids, prepared.w13.shape[0], guard)
    groups = group(topk_ids, prepared.w13.shape[0], ALIGN)
    return _steps(x.detach(), topk_weights.detach(), groups, prepared)[-1]


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
    """As `kernels.autograd.expert_layer`: the output [T, H] in x.dtype, differentiable in x, topk_weights, w13 and w2.
    guard: as in `forward`. seed: of stochastic rounding, whose random numbers are not the reference's.
    """
    check_inputs(x, topk_ids, topk_weights, prepared, spec)
    check_masters(w13, w2, prepared)
    if not needs_gradient(x, topk_weights, w13, w2):
        return forward(x, topk_ids, topk_weights, prepared, spec, guard).to(x.dtype)
    prepared.products.check_seed(seed)
    check_ids(topk_ids, len(w13), guard)
    return _ExpertLayer.apply(x, topk_ids, topk_weights, w13, w2, prepared, seed)


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
        seed: int | None,
    ) -> torch.Tensor:
        groups = group(topk_ids, len(w13), ALIGN)
        operand = x.to(torch.bfloat16).contiguous()
        *saved, output = _steps(operand, topk_weights, groups, prepared)
        # The masters are kept by reference and cast again in backward: a BF16 copy of them would cost memory.
        ctx.save_for_backward(topk_weights, w13, w2, operand, *saved)
        ctx.groups, ctx.products, ctx.seed = groups, prepared.products, seed
        return output.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator hides parameter names
        ctx: Any, *grad_outputs: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        topk_weights, w13, w2, *saved = ctx.saved_tensors
        found = expert_gradients(
            grad_outputs[0], topk_weights, w13, w2, Saved(*saved), ctx.groups, ctx.products, ctx.seed
        )
        return found.x, None, found.topk_weights, found.w13, found.w2, None, None


def _steps(
    x: torch.Tensor, topk_weights: torch.Tensor, groups: ExpertGroups, prepared: PreparedExperts
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """FC1's output [R, 2F], FC2's input [R, F] before it is quantised, and the layer's output [T, H]."""
    fc1 = _product(permute(x, groups), prepared.w13, groups, prepared.spec)
    act = weigh(swiglu(fc1, groups), groups, topk_weights)
    fc2 = _product(act, prepared.w2, groups, prepared.spec)
    if listened_to():
        for name, operand in ((Operand.FC1_INPUT, permute(x, groups)), (Operand.FC2_INPUT, act)):
            for quantized in per_tensor.quantized_rows(operand, groups):
                show(name, Shown(quantized, None))
        show_rows(groups, fc1, act, fc2)
    return fc1, act, combine(fc2, groups, torch.ones_like(topk_weights), _SUM)


def _product(
    rows: torch.Tensor, weight: TensorScaledMatrix, groups: ExpertGroups, spec: ExecutionSpec
) -> torch.Tensor:
    """bfloat16 [R, K] -> bf16(acc * ((Ax * Aw) * (1 / (Mx * Mw)))), [R, N]."""
    decoded = per_tensor.quantize_rows(rows, groups)
    alpha = (decoded.amax * weight.amax) * inverse_divisors(spec)
    # Beside outer scales of 1, which change nothing, it is the one factor of the grouped product's epilogue.
    operand = GroupedOperand(None, None, decoded.elements, alpha[groups.expert_of_row()], groups.slot_of_row)
    out = rows.new_empty(groups.rows, weight.shape[1])
    return grouped_gemm(operand, weight.product, groups, out=out)
