"""The expert layer in plain PyTorch: the definition of what an execution spec computes.

    x -> operand type -> quantised -> FC1 -> silu(gate) * up -> quantised -> FC2 -> weighted sum over the slots

Each step is a module: `kernels.quantize`, `kernels.grouped` (products and outer scales) with `kernels.accumulate`
(sums along K), `kernels.swiglu`, `kernels.combine`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.combine import combine
from kernels.experts import TORCH_TYPE, ExpertWeights
from kernels.grouped import Decoded, grouped_linear, grouped_operand
from kernels.guard import NonFiniteGuard, Operand
from kernels.packed_rows import PackedRows, check_can_pack
from kernels.probe import show
from kernels.quantize import QuantizedTensor, quantize_activation
from kernels.routing import Routing
from kernels.spec import ExecutionSpec, RouterPosition
from kernels.swiglu import cast_coefficients, fc2_input

__all__ = [
    "ExpertRows",
    "PreparedExperts",
    "check_inputs",
    "combine",
    "expert_rows",
    "forward",
    "pack_rows",
    "prepare",
]


@dataclass(frozen=True, eq=False)
class PreparedExperts:
    """One version of a layer's expert weights, decoded once for many calls under `spec`."""

    spec: ExecutionSpec
    w13: Decoded  # [E, 2F, H]
    w2: Decoded  # [E, H, F]

    def derived(self) -> dict[str, torch.Tensor]:
        """What was made from the stored tensors and is used in their place: decoded elements and outer scales."""
        if self.spec.weight is None:
            return {}  # the stored tensors themselves
        parts = {"w13": self.w13, "w2": self.w2}
        derived = {f"{name}.elements": part.elements for name, part in parts.items()}
        scales = {f"{name}.outer_scales": part.outer_scales for name, part in parts.items()}
        return derived | {name: tensor for name, tensor in scales.items() if tensor is not None}


@dataclass(frozen=True, eq=False)
class ExpertRows:
    """What the experts computed, in the routing's grouped order, in the spec's storage types."""

    fc1: torch.Tensor  # [T*k, 2F]
    swiglu: (
        torch.Tensor
    )  # [T*k, F]: FC2's input before it is quantised, router coefficient included if it is there
    fc2: torch.Tensor  # [T*k, H]


def prepare(weights: ExpertWeights, spec: ExecutionSpec) -> PreparedExperts:
    """Decode `weights`. Raises ValueError when they were stored under a spec of another layout."""
    weights = ExpertWeights.from_tensors(weights.tensors(), spec)
    return PreparedExperts(spec, _decoded(weights.w13, spec), _decoded(weights.w2, spec))


def pack_rows(x: torch.Tensor, spec: ExecutionSpec) -> PackedRows:
    """[R, H] -> the rows as FC1 multiplies them under `spec`, to be given to `forward` in the place of x.

    Rows with values that are not finite are marked, for the guard of whoever multiplies them. Raises ValueError for a
    spec that cannot pack rows (`kernels.packed_rows.can_pack`), and for another shape.
    """
    check_can_pack(spec)
    assert spec.activation is not None
    found: list[torch.Tensor] = []
    operand = x.detach().to(TORCH_TYPE[spec.operand])
    quantized = quantize_activation(operand, spec.activation, on_non_finite=found.append)
    return PackedRows.of(quantized, found[0] if found else torch.zeros(len(x), dtype=torch.bool))


def forward(
    x: torch.Tensor | PackedRows,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    prepared: PreparedExperts,
    spec: ExecutionSpec,
    guard: NonFiniteGuard | None = None,
) -> torch.Tensor:
    """The layer's output [T, H] in `spec.output`.

    x: [T, H], cast to `spec.operand` first, or what `pack_rows` made of it: the same bits. topk_ids: integer [T, k];
    topk_weights: float32 [T, k]; T may be 0. guard: takes the rows with values that the quantiser refuses; the output
    is meaningless until its `check` has passed. Raises ValueError for shapes, ids or dtypes that do not fit, for
    `prepared` of another spec, and, without a guard, for values that the quantiser refuses.
    """
    check_inputs(x, topk_ids, topk_weights, prepared, spec)
    routing = Routing.group(topk_ids, prepared.w13.elements.shape[0])
    operand = x if isinstance(x, PackedRows) else x.to(TORCH_TYPE[spec.operand])
    rows = expert_rows(operand, routing, prepared, topk_weights, guard)
    return combine(rows.fc2, routing, topk_weights, spec)


def check_inputs(
    x: torch.Tensor | PackedRows,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    prepared: PreparedExperts,
    spec: ExecutionSpec,
) -> None:
    if prepared.spec != spec:
        raise ValueError(
            f"experts were prepared under {prepared.spec.name!r}, the call asks for {spec.name!r}"
        )
    hidden = prepared.w13.elements.shape[-1]
    if isinstance(x, PackedRows):
        check_can_pack(spec)
    if len(x.shape) != 2 or x.shape[1] != hidden:
        raise ValueError(f"x must be [T, {hidden}], got {tuple(x.shape)}")
    if topk_ids.dim() != 2 or topk_ids.shape[0] != x.shape[0] or topk_ids.shape[1] == 0:
        raise ValueError(f"topk_ids must be [{x.shape[0]}, k] with k >= 1, got {tuple(topk_ids.shape)}")
    if topk_weights.shape != topk_ids.shape or topk_weights.dtype != torch.float32:
        found = f"{topk_weights.dtype} {tuple(topk_weights.shape)}"
        raise ValueError(f"topk_weights must be float32 {tuple(topk_ids.shape)}, got {found}")


def expert_rows(
    x: torch.Tensor | PackedRows,
    routing: Routing,
    prepared: PreparedExperts,
    topk_weights: torch.Tensor | None = None,
    guard: NonFiniteGuard | None = None,
) -> ExpertRows:
    """FC1, SwiGLU and FC2 of every slot; x [T, H] in `spec.operand`, or packed.

    topk_weights: float32 [T, k]; needed by specs that multiply the router coefficient ahead of FC2 (ValueError).
    """
    spec = prepared.spec
    coefficients = None
    if spec.router_position is not RouterPosition.FC2_OUTPUT:
        if topk_weights is None:
            raise ValueError(
                f"{spec.name!r} multiplies router coefficients ahead of FC2 and needs topk_weights"
            )
        coefficients = cast_coefficients(topk_weights, spec).flatten()[routing.order]
    operand = grouped_operand(x, routing.tokens, routing, spec, Operand.FC1_INPUT, guard)
    fc1 = grouped_linear(operand, routing, prepared.w13, spec).to(TORCH_TYPE[spec.fc1_output])
    act = fc2_input(fc1, coefficients, spec)
    operand = grouped_operand(act, None, routing, spec, Operand.FC2_INPUT, guard)
    fc2 = grouped_linear(operand, routing, prepared.w2, spec).to(TORCH_TYPE[spec.fc2_output])
    for name, tensor in (("fc1", fc1), ("swiglu", act), ("fc2", fc2)):
        show(name, tensor)
    return ExpertRows(fc1, act, fc2)


def _decoded(matrix: QuantizedTensor | torch.Tensor, spec: ExecutionSpec) -> Decoded:
    if isinstance(matrix, torch.Tensor):
        return Decoded(matrix, None)
    assert spec.weight is not None
    return Decoded.of(matrix, spec.weight, spec.epilogue)
