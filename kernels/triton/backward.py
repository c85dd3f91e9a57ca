"""Gradients of the expert layer from saved BF16 operands: straight-through, as `kernels.autograd` defines.

The products of the gradient are grouped BF16 products with FP32 sums: PyTorch's (CUTLASS on a GPU) for those with BF16
results, a kernel of our own for weight gradients that stay in FP32. What stands between them is one kernel a step.
Nothing is added with atomics, so that a call repeated gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.triton.codec import COMPILED, as_stored, to_bf16
from kernels.triton.grouping import ALIGN, ExpertGroups
from kernels.triton.permute import clear_padding

grouped_mm: Callable[..., torch.Tensor] = (
    getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
)
_ROWS = 16  # of a program of `_swiglu_backward`


class Gradients(NamedTuple):
    x: torch.Tensor  # [T, H]
    topk_weights: torch.Tensor  # float32 [T, k]
    w13: torch.Tensor  # [E, 2F, H]
    w2: torch.Tensor  # [E, H, F]


class Saved(NamedTuple):
    """What the forward leaves: all bfloat16, grouped rows but for x."""

    x: torch.Tensor  # [T, H], as the layer quantised it
    fc1: torch.Tensor  # [R, 2F]
    act: torch.Tensor  # [R, F], FC2's input before it is quantised; zero in padding
    fc2: torch.Tensor  # [R, H]


def expert_gradients(
    d_output: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    saved: Saved,
    groups: ExpertGroups,
) -> Gradients:
    """d_output: [T, H]; topk_weights: float32 [T, k]; w13, w2: the master weights, BF16 or FP32, in whose type their
    gradients come. The gradient of x is bfloat16, or float32 where d_output is. Experts without tokens get zeros.
    """
    d_rows, x_rows, d_topk_weights = spread(d_output, topk_weights, saved, groups)
    d_act = input_gradient(d_rows, w2, groups)
    d_fc1 = swiglu_backward(saved.fc1, d_act, groups)
    d_w2 = weight_gradient(d_rows, saved.act, groups, w2.dtype)
    del d_act, d_rows
    d_x_rows = input_gradient(d_fc1, w13, groups)
    d_w13 = weight_gradient(d_fc1, x_rows, groups, w13.dtype)
    return Gradients(sum_slots(d_x_rows, groups, d_output.dtype), d_topk_weights, d_w13, d_w2)


def spread(
    d_output: torch.Tensor, topk_weights: torch.Tensor, saved: Saved, groups: ExpertGroups
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For every grouped row bf16(p * dY) and x, zero in padding, each [R, H]; and d_p = sum(dY * row), [T, k]."""
    tokens, width = d_output.shape
    d_rows = torch.empty(groups.rows, width, dtype=torch.bfloat16, device=d_output.device)
    x_rows = torch.empty_like(d_rows)
    d_topk_weights = topk_weights.new_empty(topk_weights.shape)
    if not tokens:
        return d_rows, x_rows, d_topk_weights
    padded = triton.next_power_of_2(width)
    _spread[(tokens,)](
        d_output.contiguous(),
        topk_weights.contiguous(),
        saved.x,
        saved.fc2,
        groups.row_of_slot,
        as_stored(d_rows),
        as_stored(x_rows),
        d_topk_weights,
        H=width,
        PADDED=padded,
        TOP_K=topk_weights.shape[1],
        num_warps=4 if padded <= 4096 else 8,
    )
    clear_padding(d_rows, groups)
    clear_padding(x_rows, groups)
    return d_rows, x_rows, d_topk_weights


def swiglu_backward(fc1: torch.Tensor, d_act: torch.Tensor, groups: ExpertGroups) -> torch.Tensor:
    """bfloat16 [R, 2F], [R, F] -> gradient of silu(gate) * up, bfloat16 [R, 2F]; computed in FP32."""
    rows, width = d_act.shape
    d_fc1 = torch.empty_like(fc1)
    if rows:
        block = min(1024, triton.next_power_of_2(width))
        _swiglu_backward[(triton.cdiv(rows, _ROWS), triton.cdiv(width, block))](
            fc1,
            d_act,
            as_stored(d_fc1),
            groups.starts,
            rows,
            EXPERTS=groups.counts.shape[0],
            F=width,
            BLOCK=block,
            ROWS=_ROWS,
        )
    return d_fc1


def input_gradient(d_y: torch.Tensor, weight: torch.Tensor, groups: ExpertGroups) -> torch.Tensor:
    """bfloat16 [R, N], weights [E, N, K] taken in BF16 -> each expert's rows times its weight, bfloat16 [R, K]."""
    if not len(d_y):
        return d_y.new_empty(0, weight.shape[2])
    return grouped_mm(d_y, weight.detach().bfloat16(), offs=groups.starts[1:])


def weight_gradient(
    d_y: torch.Tensor,
    x: torch.Tensor,
    groups: ExpertGroups,
    dtype: torch.dtype,
    outer: torch.Tensor | None = None,
) -> torch.Tensor:
    """bfloat16 or, with `outer`, float16 [R, N], [R, K], zero in padding -> for each expert d_y^T x over its rows,
    [E, N, K] of `dtype`. outer: float32 [E], a factor of each expert's FP32 sums. Raises ValueError for groups that are
    not aligned to 128 rows.
    """
    if groups.align != ALIGN:
        raise ValueError(f"gradients need groups aligned to {ALIGN} rows, got {groups.align}")
    experts = groups.counts.shape[0]
    features, width = d_y.shape[1], x.shape[1]
    if not groups.rows:
        return torch.zeros(experts, features, width, dtype=dtype, device=x.device)
    if dtype is torch.bfloat16 and outer is None:
        gradient = grouped_mm(d_y.t(), x, offs=groups.starts[1:])
        # What a library leaves for an expert without rows is not relied upon.
        _clear_empty[(experts, 64)](
            as_stored(gradient), groups.counts, gradient[0].numel(), BLOCK=4096, PARTS=64
        )
        return gradient
    kind = torch.bfloat16 if dtype is torch.bfloat16 else torch.float32
    gradient = torch.empty(experts, features, width, dtype=kind, device=x.device)
    bn, bk, rows, stages, warps = (128, 256, 64, 4, 8) if COMPILED.value else (128, 128, 128, 1, 4)
    _weight_gradient[(triton.cdiv(width, bk), triton.cdiv(features, bn), experts)](
        TensorDescriptor.from_tensor(d_y, [rows, bn]),
        TensorDescriptor.from_tensor(x, [rows, bk]),
        as_stored(gradient) if kind is torch.bfloat16 else gradient,
        groups.starts,
        groups.starts if outer is None else outer,
        N=features,
        K=width,
        BN=bn,
        BK=bk,
        ROWS=rows,
        STAGES=stages,
        SCALED=outer is not None,
        BF16=kind is torch.bfloat16,
        num_warps=warps,
    )
    return gradient.to(dtype)


def sum_slots(rows: torch.Tensor, groups: ExpertGroups, dtype: torch.dtype) -> torch.Tensor:
    """bfloat16 [R, H] -> each token's rows summed in slot order and FP32, cast once to `dtype`, [T, H]."""
    tokens, top_k = groups.row_of_slot.shape
    width = rows.shape[1]
    kind = torch.bfloat16 if dtype is torch.bfloat16 else torch.float32
    total = torch.empty(tokens, width, dtype=kind, device=rows.device)
    if tokens:
        _sum_slots[(tokens,)](
            rows,
            groups.row_of_slot,
            as_stored(total) if kind is torch.bfloat16 else total,
            H=width,
            PADDED=triton.next_power_of_2(width),
            TOP_K=top_k,
            BF16=kind is torch.bfloat16,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return total


@triton.jit
def _spread(
    d_output,
    topk_weights,
    x,
    fc2,
    row_of_slot,
    d_rows,
    x_rows,
    d_topk_weights,
    H: tl.constexpr,
    PADDED: tl.constexpr,
    TOP_K: tl.constexpr,
):
    """A token a program: its gradient and its x are read once."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    inside = column < H
    d_y = tl.load(d_output + token * H + column, mask=inside, other=0.0).to(tl.float32)
    own = tl.load(x + token * H + column, mask=inside, other=0.0).to(tl.float32)
    for slot in tl.static_range(TOP_K):
        row = tl.load(row_of_slot + token * TOP_K + slot).to(tl.int64)
        there = inside & (row >= 0)
        p = tl.load(topk_weights + token * TOP_K + slot)
        y = tl.load(fc2 + row * H + column, mask=there, other=0.0).to(tl.float32)
        tl.store(d_topk_weights + token * TOP_K + slot, tl.sum(y * d_y, axis=0))
        tl.store(d_rows + row * H + column, to_bf16(p * d_y), mask=there)
        tl.store(x_rows + row * H + column, to_bf16(own), mask=there)


@triton.jit
def _swiglu_backward(
    fc1,
    d_act,
    d_fc1,
    starts,
    rows,
    EXPERTS: tl.constexpr,
    F: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    first = tl.program_id(0) * ROWS
    if first < tl.load(starts + EXPERTS):
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        for i in range(ROWS):
            row = (first + i).to(tl.int64)
            mask = (column < F) & (row < rows)
            gate = tl.load(fc1 + row * (2 * F) + column, mask=mask, other=0.0).to(tl.float32)
            up = tl.load(fc1 + row * (2 * F) + F + column, mask=mask, other=0.0).to(tl.float32)
            d = tl.load(d_act + row * F + column, mask=mask, other=0.0).to(tl.float32)
            sigmoid = tl.sigmoid(gate)
            d_gate = d * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
            tl.store(d_fc1 + row * (2 * F) + column, to_bf16(d_gate), mask=mask)
            tl.store(d_fc1 + row * (2 * F) + F + column, to_bf16(d * gate * sigmoid), mask=mask)


@triton.jit
def _clear_empty(gradient, counts, size, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    """Zero in the matrices of experts that no token is routed to."""
    e = tl.program_id(0)
    if tl.load(counts + e) == 0:
        for start in range(tl.program_id(1) * BLOCK, size, PARTS * BLOCK):
            at = start + tl.arange(0, BLOCK)
            zero = to_bf16(tl.zeros((BLOCK,), tl.float32))
            tl.store(gradient + e.to(tl.int64) * size + at, zero, mask=at < size)


@triton.jit
def _weight_gradient(
    d_y_desc,
    x_desc,
    gradient,
    starts,
    outer,
    N: tl.constexpr,
    K: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    SCALED: tl.constexpr,
    BF16: tl.constexpr,
):
    """gradient[e, n, k] = sum over the expert's rows of d_y[r, n] x[r, k], in FP32, times outer[e] if SCALED."""
    e = tl.program_id(2)
    n0 = tl.program_id(1) * BN
    k0 = tl.program_id(0) * BK
    acc = tl.zeros((BN, BK), tl.float32)
    for row in tl.range(tl.load(starts + e), tl.load(starts + e + 1), ROWS, num_stages=STAGES):
        d_y = d_y_desc.load([row, n0])
        x = x_desc.load([row, k0])
        if COMPILED:
            acc = tl.dot(d_y.T, x, acc)
        else:
            acc = tl.dot(d_y.to(tl.float32).T, x.to(tl.float32), acc)
    n = n0 + tl.arange(0, BN)
    k = k0 + tl.arange(0, BK)
    at = (e.to(tl.int64) * N + n)[:, None] * K + k[None, :]
    if SCALED:
        acc *= tl.load(outer + e)
    if BF16:
        acc = to_bf16(acc)
    tl.store(gradient + at, acc, mask=(n < N)[:, None] & (k < K)[None, :])


@triton.jit
def _sum_slots(
    rows,
    row_of_slot,
    total,
    H: tl.constexpr,
    PADDED: tl.constexpr,
    TOP_K: tl.constexpr,
    BF16: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    inside = column < H
    acc = tl.zeros((PADDED,), tl.float32)
    for slot in tl.static_range(TOP_K):
        row = tl.load(row_of_slot + token * TOP_K + slot).to(tl.int64)
        acc += tl.load(rows + row * H + column, mask=inside & (row >= 0), other=0.0).to(tl.float32)
    if BF16:
        tl.store(total + token * H + column, to_bf16(acc), mask=inside)
    else:
        tl.store(total + token * H + column, acc, mask=inside)
