"""The expert layer of a spec without quantisers, as `bf16`: the Triton kernels' steps around PyTorch's grouped product.

    group slots -> permute -> FC1 -> SwiGLU -> FC2 -> weighted sum over the slots

The products are `grouped_mm` in BF16 with FP32 sums, in an order of the library's own, which the spec leaves open; all
else computes the reference's bits. Backward is `kernels.triton.backward`'s, from the same operands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from kernels.catalogue import named_spec
from kernels.experts import ExpertWeights
from kernels.guard import NonFiniteGuard, Operand
from kernels.probe import listened_to, show
from kernels.spec import Backward, Epilogue, ExecutionSpec
from kernels.triton.backward import Saved, expert_gradients, grouped_mm
from kernels.triton.combine import combine
from kernels.triton.grouping import ALIGN, ExpertGroups, group
from kernels.triton.layer import check_ids, check_inputs, check_masters, needs_gradient
from kernels.triton.operand import BLOCK
from kernels.triton.ops import show_rows, used_rows
from kernels.triton.permute import permute
from kernels.triton.support import check_layer
from kernels.triton.swiglu import swiglu

_ALIGN_FEW = 16  # rows, of which fewer are padding where an expert has few
_FEW = 4096  # slots
_SPEC = named_spec("bf16")  # combines as all specs that are computed here


@dataclass(frozen=True, eq=False)
class PreparedExperts:
    """One version of a layer's expert weights: the stored tensors themselves."""

    spec: ExecutionSpec
    w13: torch.Tensor  # bfloat16 [E, 2F, H]
    w2: torch.Tensor  # bfloat16 [E, H, F]

    def derived(self) -> dict[str, torch.Tensor]:
        """As `kernels.reference.PreparedExperts.derived`: nothing."""
        return {}


def check_spec(spec: ExecutionSpec) -> None:
    """Raises ValueError, naming the field, for a spec that is not computed here."""
    check_layer(spec)
    for field, found, computed in (
        ("activation", spec.activation, None),
        ("weight", spec.weight, None),
        ("epilogue", spec.epilogue, Epilogue.NONE),
        ("backward", spec.backward, Backward.BF16_STRAIGHT_THROUGH),
    ):
        if found != computed:
            name = "quantised" if computed is None else found
            wanted = "none" if computed is None else computed
            raise ValueError(
                f"the grouped BF16 layer does not compute {spec.name!r}: {field}={name}, computed is {wanted}"
            )


def prepare(weights: ExpertWeights, spec: ExecutionSpec, *, compact: bool = False) -> PreparedExperts:
    """compact: there is one form. Raises ValueError for weights of another layout, for widths that are no multiples of
    16, and for a spec that is not computed here.
    """
    check_spec(spec)
    weights = ExpertWeights.from_tensors(weights.tensors(), spec)
    w13, w2 = weights.w13, weights.w2
    assert isinstance(w13, torch.Tensor) and isinstance(w2, torch.Tensor)
    if w13.shape[2] % BLOCK or w2.shape[2] % BLOCK:
        raise ValueError(
            f"grouped BF16 products take widths that are multiples of {BLOCK}, got hidden {w13.shape[2]} and expert"
            f" FFN {w2.shape[2]}"
        )
    return PreparedExperts(spec, w13, w2)


def forward(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    prepared: PreparedExperts,
    spec: ExecutionSpec,
    guard: NonFiniteGuard | None = None,
) -> torch.Tensor:
    """As `kernels.reference.forward`: the layer's output, bfloat16 [T, H]. Values that are not finite are carried
    through, as the spec has no quantiser to refuse them.

    With a guard nothing waits for the device, and expert ids are not checked: a slot whose id does not exist makes its
    token's output NaN. Without one, such ids raise ValueError.
    """
    check_inputs(x, topk_ids, topk_weights, prepared, spec)
    check_ids(topk_ids, len(prepared.w13), guard)
    run = experts if torch.compiler.is_compiling() else run_experts
    return run(x.detach(), topk_ids, topk_weights.detach(), prepared.w13, prepared.w2)


@torch.library.custom_op("minite::plain_experts", mutates_args=())
def experts(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor
) -> torch.Tensor:
    """The operator for `torch.compile`: x bfloat16 or float32 [T, H], ids [T, k], float32 [T, k] -> bfloat16 [T, H]."""
    return run_experts(x, topk_ids, topk_weights, w13, w2)


@experts.register_fake
def _(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor
) -> torch.Tensor:
    return x.new_empty(x.shape, dtype=torch.bfloat16)


def run_experts(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor
) -> torch.Tensor:
    """What the operator does, without the dispatcher's time on the host."""
    groups = group(topk_ids, len(w13), ALIGN if topk_ids.numel() > _FEW else _ALIGN_FEW)
    return combine(steps(x, groups, w13, w2).fc2, groups, topk_weights, _SPEC)


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

    seed is not used: nothing here rounds stochastically. guard: as in `forward`. Gradients of FP32 master weights are
    FP32 sums; those of BF16 ones are rounded to BF16 once.
    """
    check_inputs(x, topk_ids, topk_weights, prepared, spec)
    check_masters(w13, w2, prepared)
    if not needs_gradient(x, topk_weights, w13, w2):
        return forward(x, topk_ids, topk_weights, prepared, spec, guard).to(x.dtype)
    check_ids(topk_ids, len(w13), guard)
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
        groups = group(topk_ids, len(w13), ALIGN)
        saved = steps(x.to(torch.bfloat16).contiguous(), groups, prepared.w13, prepared.w2)
        # The masters are kept by reference and cast again in backward: a BF16 copy of them would cost memory.
        ctx.save_for_backward(topk_weights, w13, w2, *saved)
        ctx.groups = groups
        return combine(saved.fc2, groups, topk_weights, _SPEC).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator hides parameter names
        ctx: Any, *grad_outputs: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        topk_weights, w13, w2, *saved = ctx.saved_tensors
        found = expert_gradients(grad_outputs[0], topk_weights, w13, w2, Saved(*saved), ctx.groups)
        return found.x, None, found.topk_weights, found.w13, found.w2, None


def steps(x: torch.Tensor, groups: ExpertGroups, w13: torch.Tensor, w2: torch.Tensor) -> Saved:
    """x [T, H] and what the products and SwiGLU make of it in grouped order."""
    rows = permute(x, groups)
    fc1 = _product(rows, w13, groups)
    act = swiglu(fc1, groups)
    fc2 = _product(act, w2, groups)
    if listened_to():
        for name, operand in ((Operand.FC1_INPUT, rows), (Operand.FC2_INPUT, act)):
            show(name, operand[used_rows(groups)])
        show_rows(groups, fc1, act, fc2)
    return Saved(x, fc1, act, fc2)


def _product(rows: torch.Tensor, weight: torch.Tensor, groups: ExpertGroups) -> torch.Tensor:
    """bfloat16 [R, K], [E, N, K] -> each row times the transpose of its expert's weight, bfloat16 [R, N]."""
    if not len(rows):
        return rows.new_empty(0, weight.shape[1])
    return grouped_mm(rows, weight.transpose(1, 2), offs=groups.starts[1:])
