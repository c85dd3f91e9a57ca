"""The expert layer in plain PyTorch: the definition of what an execution spec computes.

`fp32_any_order` says that an element of a product is the sum of exact products, rounded to FP32 in an order
that the spec leaves open. The reference takes the member of that family that depends on nothing else: it sums
in FP64 and rounds once. Under NVFP4 an operand value is code times block scale, a multiple of 2^-10 of
magnitude at most 2688. Products are then multiples of 2^-20, and partial sums over K elements are at most K *
2688^2 < 2^33 for K <= 1184: 53 bits, which FP64 holds exactly. The sum thus does not depend on the BLAS, the
threads, or the rows that share the call. A longer K is cut into segments of 1024, each exact, whose sums are
added in order; that too is independent of the batch, and exact as long as the total stays below 2^33.

BF16 operands have no such bound. Their FP64 sums differ between orders by about 2^-52 of the terms' size, and
the FP32 rounding hides that except where a sum lies that close to a rounding boundary: rare, but not
excluded.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import torch
import torch.nn.functional as F

from kernels.experts import TORCH_TYPE, ExpertWeights
from kernels.quantize import QuantizedTensor, decode, quantize_activation
from kernels.routing import Routing, sum_in_slot_order
from kernels.spec import Accumulation, ActivationScaleDomain, ExecutionSpec, Swiglu

_SEGMENT = 1024  # elements along K whose products FP64 sums exactly


@dataclass(frozen=True, eq=False)
class PreparedMatrix:
    """elements: [E, N, K], code times block scale in bfloat16 (exact), or the plain weight.
    outer_scales: float32 [E, N] or [E, 1] under NVFP4, else None.
    """

    elements: torch.Tensor
    outer_scales: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class PreparedExperts:
    """One version of a layer's expert weights, decoded once for many calls under `spec`."""

    spec: ExecutionSpec
    w13: PreparedMatrix  # [E, 2F, H]
    w2: PreparedMatrix  # [E, H, F]


@dataclass(frozen=True, eq=False)
class ExpertRows:
    """What the experts computed, in the routing's grouped order, in the spec's storage types."""

    fc1: torch.Tensor  # [T*k, 2F]
    swiglu: torch.Tensor  # [T*k, F]
    fc2: torch.Tensor  # [T*k, H]


def prepare(weights: ExpertWeights, spec: ExecutionSpec) -> PreparedExperts:
    """Decode `weights`. Raises ValueError when they were stored under a spec of another layout."""
    weights = ExpertWeights.from_tensors(weights.tensors(), spec)
    return PreparedExperts(spec, _prepare_matrix(weights.w13), _prepare_matrix(weights.w2))


def forward(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    prepared: PreparedExperts,
    spec: ExecutionSpec,
) -> torch.Tensor:
    """The layer's output [T, H] in `spec.output`.

    x: [T, H], cast to `spec.operand` first; topk_ids: integer [T, k]; topk_weights: float32 [T, k]; T may be
    0. Raises ValueError for shapes, ids or dtypes that do not fit, for `prepared` of another spec, and, under
    NVFP4, for an operand of FC1 or FC2 that is not finite.
    """
    check_inputs(x, topk_ids, topk_weights, prepared, spec)
    routing = Routing.group(topk_ids, prepared.w13.elements.shape[0])
    rows = expert_rows(x.to(TORCH_TYPE[spec.operand]), routing, prepared)
    return combine(rows.fc2, routing, topk_weights, spec)


def check_inputs(
    x: torch.Tensor,
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
    if x.dim() != 2 or x.shape[1] != hidden:
        raise ValueError(f"x must be [T, {hidden}], got {tuple(x.shape)}")
    if topk_ids.dim() != 2 or topk_ids.shape[0] != x.shape[0] or topk_ids.shape[1] == 0:
        raise ValueError(f"topk_ids must be [{x.shape[0]}, k] with k >= 1, got {tuple(topk_ids.shape)}")
    if topk_weights.shape != topk_ids.shape or topk_weights.dtype != torch.float32:
        found = f"{topk_weights.dtype} {tuple(topk_weights.shape)}"
        raise ValueError(f"topk_weights must be float32 {tuple(topk_ids.shape)}, got {found}")


def expert_rows(x: torch.Tensor, routing: Routing, prepared: PreparedExperts) -> ExpertRows:
    """FC1, SwiGLU and FC2 of every slot; x [T, H] in `spec.operand`."""
    spec = prepared.spec
    fc1 = _grouped_linear(x, routing.tokens, routing, prepared.w13, spec).to(TORCH_TYPE[spec.fc1_output])
    swiglu = _swiglu(fc1, spec).to(TORCH_TYPE[spec.swiglu_output])
    fc2 = _grouped_linear(swiglu, None, routing, prepared.w2, spec).to(TORCH_TYPE[spec.fc2_output])
    return ExpertRows(fc1, swiglu, fc2)


def combine(
    fc2: torch.Tensor, routing: Routing, topk_weights: torch.Tensor, spec: ExecutionSpec
) -> torch.Tensor:
    """Grouped FC2 rows [T*k, H] -> [T, H], weighted and summed in slot order in FP32, cast once."""
    return sum_in_slot_order(routing.by_token(fc2), topk_weights).to(TORCH_TYPE[spec.output])


def _prepare_matrix(matrix: QuantizedTensor | torch.Tensor) -> PreparedMatrix:
    if isinstance(matrix, QuantizedTensor):
        return PreparedMatrix(decode(matrix, torch.bfloat16), matrix.outer_scales)
    return PreparedMatrix(matrix, None)


def _grouped_linear(
    x: torch.Tensor, rows: torch.Tensor | None, routing: Routing, matrix: PreparedMatrix, spec: ExecutionSpec
) -> torch.Tensor:
    """Each grouped row times the transpose of its expert's [N, K]: float32 [T*k, N].

    rows: which row of x is each grouped row; None when x is grouped already.
    """
    elements, scales = _operand(x, rows, routing, spec)
    product = x.new_empty(len(elements), matrix.elements.shape[1], dtype=torch.float32)
    for expert, own in routing.occupied():
        accumulator = _product(elements[own], matrix.elements[expert], spec)
        if scales is not None and matrix.outer_scales is not None:
            accumulator *= scales[own] * matrix.outer_scales[expert]
        product[own] = accumulator
    return product


def _operand(
    x: torch.Tensor, rows: torch.Tensor | None, routing: Routing, spec: ExecutionSpec
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The left operand of a grouped product, in grouped order: elements [T*k, K] and, under NVFP4, outer scales
    float32 [T*k, 1]. A token's own scale depends on its row alone: the row is quantised once for all its slots.
    """
    if not spec.quantized:
        return (x if rows is None else x[rows]), None
    if spec.activation_scale_domain is ActivationScaleDomain.TOKEN:
        quantized = quantize_activation(x, spec)
        elements, scales = decode(quantized, torch.bfloat16), quantized.outer_scales
        return (elements, scales) if rows is None else (elements[rows], scales[rows])
    grouped = x if rows is None else x[rows]
    elements, scales = torch.empty_like(grouped), grouped.new_empty(len(grouped), 1, dtype=torch.float32)
    for _, own in routing.occupied():
        quantized = quantize_activation(grouped[own], spec)
        elements[own], scales[own] = decode(quantized, torch.bfloat16), quantized.outer_scales
    return elements, scales


def _product(x: torch.Tensor, weight: torch.Tensor, spec: ExecutionSpec) -> torch.Tensor:
    """[R, K], [N, K] -> float32 [R, N]."""
    if spec.accumulation is Accumulation.FP32_GEMM:
        return x @ weight.T
    segments = zip(x.split(_SEGMENT, dim=1), weight.split(_SEGMENT, dim=1), strict=True)
    return reduce(torch.add, (a.double() @ b.double().T for a, b in segments)).float()


def _swiglu(fc1: torch.Tensor, spec: ExecutionSpec) -> torch.Tensor:
    """[R, 2F] -> float32 silu(gate) * up, [R, F]."""
    gate, up = fc1.chunk(2, dim=-1)
    if spec.swiglu is Swiglu.FP32_LIBRARY_SILU:
        return F.silu(gate) * up
    # An FP32 exponential differs between vector and scalar code, hence between positions in a batch.
    return F.silu(gate.double()).float() * up.float()
