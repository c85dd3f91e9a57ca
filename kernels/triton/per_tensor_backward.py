"""Gradients of the layer in `kernels.triton.per_tensor_layer`, whose router coefficient is multiplied ahead of FC2.

Their formulas: `kernels.autograd`; the operands of the four products: `kernels.backward`. Quantised, each operand is
coded along the sum with one scale an expert, and the decoded elements are multiplied by the emulated products.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.backward import derived_seed
from kernels.quantizer_spec import Rounding
from kernels.spec import ExecutionSpec
from kernels.triton import per_tensor
from kernels.triton.backward import Gradients, input_gradient, sum_slots, weight_gradient
from kernels.triton.codec import as_stored, round_bf16, to_bf16
from kernels.triton.grouped_gemm import grouped_gemm
from kernels.triton.grouping import ExpertGroups
from kernels.triton.matrix import ExpertMatrix
from kernels.triton.operand import GroupedOperand
from kernels.triton.permute import permute

_ROWS = 16  # of a program


class Saved(NamedTuple):
    """What the forward leaves: all bfloat16, grouped rows but for x."""

    x: torch.Tensor  # [T, H], as the layer quantised it
    fc1: torch.Tensor  # [R, 2F]
    act: torch.Tensor  # [R, F], FC2's input before it is quantised, the coefficient included; zero in padding


class Products:
    """The gradient's products under `spec`, for one version of a layer's weights."""

    def __init__(self, spec: ExecutionSpec) -> None:
        self.spec = spec
        self._weights: dict[str, tuple[tuple[int, int], ExpertMatrix]] = {}

    def check_seed(self, seed: int | None) -> None:
        """Raises ValueError for a seed that is missing."""
        if self._stochastic and seed is None:
            raise ValueError(f"{self.spec.name!r} rounds gradients stochastically and needs a seed")

    def dgrad(
        self, d_y: torch.Tensor, master: torch.Tensor, groups: ExpertGroups, name: str, seed: int | None
    ) -> torch.Tensor:
        """bfloat16 [R, N], [E, N, K] -> bfloat16 [R, K]."""
        if self.spec.gradient is None:
            return input_gradient(d_y, master, groups)
        weight = self.transposed(master, name)
        gradient = per_tensor.quantize_rows(d_y, groups, seed=self._seed(seed, f"dgrad of {name}"))
        outer = gradient.decode_scale()[groups.expert_of_row()]
        operand = GroupedOperand(None, None, gradient.elements, outer, groups.slot_of_row)
        return grouped_gemm(operand, weight, groups, out=d_y.new_empty(groups.rows, weight.shape[1]))

    def wgrad(
        self,
        d_y: torch.Tensor,
        x: torch.Tensor,
        groups: ExpertGroups,
        name: str,
        seed: int | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """bfloat16 [R, N], [R, K], zero in padding -> [E, N, K] of `dtype`."""
        if self.spec.gradient is None:
            return weight_gradient(d_y, x, groups, dtype)
        own = self._seed(seed, f"wgrad of {name}")
        gradient = per_tensor.quantize_columns(d_y, groups, rotate=True, seed=own)
        other = per_tensor.quantize_columns(x, groups, rotate=True)
        outer = gradient.decode_scale() * other.decode_scale()
        return weight_gradient(gradient.elements, other.elements, groups, dtype, outer)

    def transposed(self, master: torch.Tensor, name: str) -> ExpertMatrix:
        """[E, N, K] -> the weight [E, K, N] of the product `name`, coded along N: made when it is first asked for, as
        layers that only score do without.
        """
        version = master.data_ptr(), master._version
        held = self._weights.get(name)
        if held is None or held[0] != version:
            experts, features, width = master.shape
            decoded = per_tensor.transposed_weight(master.detach().to(torch.bfloat16))
            outer = decoded.decode_scale()[:, None].expand(experts, width).contiguous()
            held = version, ExpertMatrix(outer, (experts, width, features), decoded.elements)
            self._weights[name] = held
        return held[1]

    @property
    def _stochastic(self) -> bool:
        gradient = self.spec.gradient
        return gradient is not None and gradient.rounding is Rounding.STOCHASTIC

    def _seed(self, seed: int | None, name: str) -> int | None:
        if not self._stochastic:
            return None
        assert seed is not None
        return derived_seed(seed, name)


def expert_gradients(
    d_output: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    saved: Saved,
    groups: ExpertGroups,
    products: Products,
    seed: int | None,
) -> Gradients:
    """As `kernels.triton.backward.expert_gradients`."""
    d_rows = permute(d_output, groups)
    d_act = products.dgrad(d_rows, w2, groups, "FC2", seed)
    d_fc1, d_topk_weights = swiglu_backward(saved.fc1, d_act, groups, topk_weights)
    d_w2 = products.wgrad(d_rows, saved.act, groups, "FC2", seed, w2.dtype)
    del d_act, d_rows
    d_x_rows = products.dgrad(d_fc1, w13, groups, "FC1", seed)
    d_w13 = products.wgrad(d_fc1, permute(saved.x, groups), groups, "FC1", seed, w13.dtype)
    return Gradients(sum_slots(d_x_rows, groups, d_output.dtype), d_topk_weights, d_w13, d_w2)


def weigh(act: torch.Tensor, groups: ExpertGroups, topk_weights: torch.Tensor) -> torch.Tensor:
    """bfloat16 [R, F], zero in padding, times the coefficient of each row's slot, rounded to bfloat16."""
    result = torch.empty_like(act)
    rows, width = act.shape
    if rows:
        block = min(1024, triton.next_power_of_2(width))
        _weigh[(triton.cdiv(rows, _ROWS), triton.cdiv(width, block))](
            act,
            as_stored(result),
            topk_weights.contiguous(),
            groups.slot_of_row,
            groups.starts,
            rows,
            EXPERTS=groups.counts.shape[0],
            F=width,
            BLOCK=block,
            ROWS=_ROWS,
        )
    return result


def swiglu_backward(
    fc1: torch.Tensor, d_act: torch.Tensor, groups: ExpertGroups, topk_weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """bfloat16 [R, 2F], [R, F], float32 [T, k] -> gradients of p * bf16(silu(gate) * up), bfloat16 [R, 2F] and float32
    [T, k]; computed in FP32.
    """
    rows, width = d_act.shape
    d_fc1, d_topk_weights = torch.empty_like(fc1), torch.zeros_like(topk_weights)
    if rows:
        _swiglu_backward[(triton.cdiv(rows, _ROWS),)](
            fc1,
            d_act,
            as_stored(d_fc1),
            topk_weights.contiguous(),
            d_topk_weights,
            groups.slot_of_row,
            groups.starts,
            rows,
            EXPERTS=groups.counts.shape[0],
            F=width,
            BLOCK=min(1024, triton.next_power_of_2(width)),
            ROWS=_ROWS,
        )
    return d_fc1, d_topk_weights


@triton.jit
def _weigh(
    act,
    result,
    topk_weights,
    slot_of_row,
    starts,
    rows,
    EXPERTS: tl.constexpr,
    F: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    first = tl.program_id(0) * ROWS
    if first < tl.load(starts + EXPERTS):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        slot = tl.load(slot_of_row + row, mask=row < rows, other=-1)
        p = tl.load(topk_weights + slot, mask=slot >= 0, other=0.0)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        at = row[:, None] * F + column[None, :]
        mask = (row < rows)[:, None] & (column < F)[None, :]
        own = tl.load(act + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(result + at, to_bf16(p[:, None] * own), mask=mask)


@triton.jit
def _swiglu_backward(
    fc1,
    d_act,
    d_fc1,
    topk_weights,
    d_topk_weights,
    slot_of_row,
    starts,
    rows,
    EXPERTS: tl.constexpr,
    F: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    first = tl.program_id(0) * ROWS
    if first < tl.load(starts + EXPERTS):
        for i in range(ROWS):
            row = (first + i).to(tl.int64)
            slot = tl.load(slot_of_row + row, mask=row < rows, other=-1)
            p = tl.load(topk_weights + slot, mask=slot >= 0, other=0.0)
            total = tl.zeros((BLOCK,), tl.float32)
            for start in range(0, F, BLOCK):
                column = start + tl.arange(0, BLOCK)
                mask = (column < F) & (row < rows)
                gate = tl.load(fc1 + row * (2 * F) + column, mask=mask, other=0.0).to(tl.float32)
                up = tl.load(fc1 + row * (2 * F) + F + column, mask=mask, other=0.0).to(tl.float32)
                d = tl.load(d_act + row * F + column, mask=mask, other=0.0).to(tl.float32)
                sigmoid = tl.sigmoid(gate)
                own = (round_bf16(gate * sigmoid * up) << 16).to(tl.float32, bitcast=True)
                total += d * own
                d *= p
                d_gate = d * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
                tl.store(d_fc1 + row * (2 * F) + column, to_bf16(d_gate), mask=mask)
                tl.store(d_fc1 + row * (2 * F) + F + column, to_bf16(d * gate * sigmoid), mask=mask)
            tl.store(d_topk_weights + slot, tl.sum(total, axis=0), mask=slot >= 0)
