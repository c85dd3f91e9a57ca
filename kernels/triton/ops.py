"""The layer as PyTorch operators, so that `torch.compile` and CUDA graphs take it as it is.

Weights come as the lists of `ExpertMatrix.tensors`. Each operator has a fake implementation, which gives shapes and
types only; `experts_for_gradient` has its backward registered, an operator too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import triton
import triton.language as tl

from kernels.catalogue import named_spec
from kernels.guard import Operand
from kernels.packed_rows import PackedRows
from kernels.probe import Shown, listened_to, show
from kernels.triton import tuning
from kernels.triton.backward import Saved, expert_gradients
from kernels.triton.combine import combine
from kernels.triton.decode_gemm import decode_gemm
from kernels.triton.grouped_gemm import grouped_gemm
from kernels.triton.grouping import ALIGN, ExpertGroups, capacity, group
from kernels.triton.matrix import ExpertMatrix
from kernels.triton.operand import GroupedOperand, packed_rows
from kernels.triton.packed_gemm import packed_gemm
from kernels.triton.packed_rows import permute_packed
from kernels.triton.quantize import permute_quantize
from kernels.triton.support import plain
from kernels.triton.swiglu import swiglu_quantize

_SPEC = named_spec("minite")  # all specs that these kernels compute have its activations and combination


@torch.library.custom_op("minite::experts", mutates_args=())
def experts(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: Sequence[torch.Tensor],
    w2: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """x bfloat16 [T, H], ids [T, k], float32 [T, k] -> bfloat16 [T, H], and int64 [2, E]: the rows of FC1's and FC2's
    inputs that were not finite.
    """
    matrices = ExpertMatrix.from_tensors(list(w13)), ExpertMatrix.from_tensors(list(w2))
    bad = no_bad_rows(matrices[0])
    return run_experts(x, topk_ids, topk_weights, *matrices, bad), bad


@experts.register_fake
def _(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: Sequence[torch.Tensor],
    w2: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape, dtype=torch.bfloat16), x.new_empty((2, w13[0].shape[0]), dtype=torch.int64)


@torch.library.custom_op("minite::experts_for_gradient", mutates_args=())
def experts_for_gradient(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    master13: torch.Tensor,
    master2: torch.Tensor,
    w13: Sequence[torch.Tensor],
    w2: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """As `experts`, x in BF16 or FP32 and the output in its type; between output and counts stand what backward takes:
    x in BF16, the grouped FC1 output, FC2's input and FC2's output, and the fields of `ExpertGroups`.
    """
    matrices = ExpertMatrix.from_tensors(list(w13)), ExpertMatrix.from_tensors(list(w2))
    bad = no_bad_rows(matrices[0])
    output, *rest = run_experts_for_gradient(x, topk_ids, topk_weights, *matrices, bad)
    if rest[0] is x:  # an operator's result must not be its argument
        rest[0] = x.clone(memory_format=torch.contiguous_format)
    return [output, *rest, bad]


@experts_for_gradient.register_fake
def _(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    master13: torch.Tensor,
    master2: torch.Tensor,
    w13: Sequence[torch.Tensor],
    w2: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    experts_, two_ffn, hidden = master13.shape
    rows = capacity(topk_ids.numel(), experts_, ALIGN)

    def ints(*shape: int) -> torch.Tensor:
        return x.new_empty(shape, dtype=torch.int32)

    def floats(*shape: int) -> torch.Tensor:
        return x.new_empty(shape, dtype=torch.bfloat16)

    groups = [ints(*topk_ids.shape), ints(rows), ints(experts_ + 1), ints(experts_), ints(rows // ALIGN)]
    saved = [floats(*x.shape), floats(rows, two_ffn), floats(rows, two_ffn // 2), floats(rows, hidden)]
    return [x.new_empty(x.shape), *saved, *groups, x.new_empty((2, experts_), dtype=torch.int64)]


@torch.library.custom_op("minite::experts_backward", mutates_args=())
def experts_backward(
    d_output: torch.Tensor,
    topk_weights: torch.Tensor,
    master13: torch.Tensor,
    master2: torch.Tensor,
    saved: Sequence[torch.Tensor],
    groups: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of x (in d_output's type), topk_weights and the master weights."""
    found = expert_gradients(d_output, topk_weights, master13, master2, Saved(*saved), groups_of(groups))
    return found.x, found.topk_weights, found.w13, found.w2


@experts_backward.register_fake
def _(
    d_output: torch.Tensor,
    topk_weights: torch.Tensor,
    master13: torch.Tensor,
    master2: torch.Tensor,
    saved: Sequence[torch.Tensor],
    groups: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    d_x, d_p, d_13, d_2 = (own.new_empty(own.shape) for own in (d_output, topk_weights, master13, master2))
    return d_x, d_p, d_13, d_2


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    topk_weights, master13, master2 = inputs[2:5]
    # The masters are kept by reference and cast again in backward: a BF16 copy of them would cost memory.
    ctx.save_for_backward(topk_weights, master13, master2, *output[1:-1])
    ctx.lists = [None] * len(inputs[5]), [None] * len(inputs[6])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, gradients: list[torch.Tensor | None]) -> tuple[Any, ...]:
    d_output = gradients[0]
    if d_output is None:
        return None, None, None, None, None, *ctx.lists
    topk_weights, master13, master2, *rest = ctx.saved_tensors
    d_x, d_p, d_13, d_2 = experts_backward(d_output, topk_weights, master13, master2, rest[:4], rest[4:])
    return d_x, None, d_p, d_13, d_2, *ctx.lists


experts_for_gradient.register_autograd(_backward, setup_context=_setup)


def no_bad_rows(matrix: ExpertMatrix) -> torch.Tensor:
    """int64 [2, E] of zeros: counts of rows that are not finite."""
    return torch.zeros(2, matrix.shape[0], dtype=torch.int64, device=matrix.outer.device)


def run_experts(
    x: torch.Tensor | PackedRows,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: ExpertMatrix,
    w2: ExpertMatrix,
    bad: torch.Tensor,
) -> torch.Tensor:
    """What the operator `experts` does, without the dispatcher's time on the host, and of packed rows as well, unless
    w13 is for the native product. bad: int64 [2, E], to which the rows of FC1's and FC2's inputs that are not finite
    are added.
    """
    slots, num_experts = topk_ids.numel(), w13.shape[0]
    compact = w13.compact or w2.compact
    packed = w13.packed and w2.packed and tuning.reads_packed(slots, num_experts, compact=compact)
    align = tuning.tile_rows(slots, num_experts) if packed else ALIGN
    # Copies must be older than the groups: see `permute_quantize` and `combine`.
    x, topk_weights = x if isinstance(x, PackedRows) else plain(x), topk_weights.contiguous()
    groups = group(topk_ids, num_experts, align)
    if align not in tuning.FEW_ROWS:
        # So many that to look up the row of each slot would take longer than to permute padding as well.
        product = packed_gemm if packed else grouped_gemm
        return combine(_steps(x, groups, w13, w2, bad, product=product)[2], groups, topk_weights, _SPEC)
    # Not memory of the steps, some of whose programs may still be at work when others are combined.
    output = torch.empty(len(topk_ids), w2.shape[1], dtype=torch.bfloat16, device=topk_ids.device)
    fc2, after = _few_steps(x, groups, w13, w2, bad)
    return combine(fc2, groups, topk_weights, _SPEC, overlap=True, after=after, out=output)


def run_experts_for_gradient(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: ExpertMatrix,
    w2: ExpertMatrix,
    bad: torch.Tensor,
) -> list[torch.Tensor]:
    """What the operator `experts_for_gradient` does, but for the counts; x itself is among the results if BF16."""
    operand = plain(x.to(torch.bfloat16))
    groups = group(topk_ids, w13.shape[0], ALIGN)
    fc1, act, fc2 = _steps(operand, groups, w13, w2, bad, keep_act=True)
    assert act is not None
    output = combine(fc2, groups, topk_weights, _SPEC).to(x.dtype)
    return [output, operand, fc1, act, fc2, *_group_tensors(groups)]


_Steps = tuple[
    torch.Tensor, torch.Tensor | None, torch.Tensor
]  # FC1's output, FC2's input if kept, FC2's output


class _Product(Protocol):
    def __call__(
        self, operand: GroupedOperand, weight: ExpertMatrix, groups: ExpertGroups, *, out: torch.Tensor
    ) -> torch.Tensor: ...


def _steps(
    x: torch.Tensor | PackedRows,
    groups: ExpertGroups,
    w13: ExpertMatrix,
    w2: ExpertMatrix,
    bad: torch.Tensor,
    keep_act: bool = False,
    product: _Product = grouped_gemm,
) -> _Steps:
    """Rows are permuted with their padding."""
    native, quantizer, seen = w13.native, _SPEC.activation, listened_to()
    assert quantizer is not None
    packed, decoded = native or seen, not native
    if isinstance(x, PackedRows):
        operand = permute_packed(x, groups)
    else:
        operand = permute_quantize(x, groups, quantizer, packed=packed, decoded=decoded)
    fc1 = _rows_for(groups, w13)
    product(operand, w13, groups, out=fc1)
    inner, act = swiglu_quantize(
        fc1, groups, quantizer, packed=packed, decoded=decoded, keep_act=keep_act or seen
    )
    fc2 = _rows_for(groups, w2)
    product(inner, w2, groups, out=fc2)
    _count_bad(operand, inner, groups, bad)
    show_operands(groups, x if isinstance(x, PackedRows) else operand, inner)
    show_rows(groups, fc1, act, fc2)
    return fc1, act, fc2


def _few_steps(
    x: torch.Tensor | PackedRows,
    groups: ExpertGroups,
    w13: ExpertMatrix,
    w2: ExpertMatrix,
    bad: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """For few rows an expert: nothing touches padding, and every step is one launch. With a listener there are more
    launches, of the same steps. Gives FC2's output and where its programs count what they have finished.
    """
    quantizer, seen = _SPEC.activation, listened_to()
    assert quantizer is not None
    form = {"packed": seen, "decoded": True}
    counts = (None, None) if seen else bad
    # A step goes on with the tiles that the one before has finished, while that one still works on others: operand, fc1
    # and inner are held until the last step is launched, so that nothing is allocated over what is still read.
    finished = [None] * 3 if seen or groups.finished is None else list(groups.finished)
    if isinstance(x, PackedRows):
        operand = permute_packed(x, groups, counts[0])
    else:
        operand = permute_quantize(x, groups, quantizer, **form, bad_counts=counts[0])
    fc1 = _rows_for(groups, w13)
    decode_gemm(operand, w13, groups, out=fc1, finished=finished[0])
    inner, act = swiglu_quantize(
        fc1,
        groups,
        quantizer,
        **form,
        keep_act=seen,
        bad_counts=counts[1],
        after=finished[0],
        finished=finished[1],
    )
    fc2 = _rows_for(groups, w2)
    decode_gemm(inner, w2, groups, out=fc2, after=finished[1], finished=finished[2])
    if seen:
        _count_bad(operand, inner, groups, bad)
    show_operands(groups, x if isinstance(x, PackedRows) else operand, inner)
    show_rows(groups, fc1, act, fc2)
    return fc2, finished[2]


def _rows_for(groups: ExpertGroups, weight: ExpertMatrix) -> torch.Tensor:
    """bfloat16 [R, N], not written, for the product of grouped rows with a weight [E, N, K]."""
    return torch.empty(groups.rows, weight.shape[1], dtype=torch.bfloat16, device=weight.outer.device)


def show_operands(groups: ExpertGroups, first: GroupedOperand | PackedRows, second: GroupedOperand) -> None:
    """FC1's and FC2's packed inputs, the rows in use, to a listener. Waits for the device then."""
    if listened_to():
        used, top_k = used_rows(groups), groups.row_of_slot.shape[1]
        for name, operand in ((Operand.FC1_INPUT, first), (Operand.FC2_INPUT, second)):
            if isinstance(operand, PackedRows):
                records = operand.index[groups.slot_of_row[used] // top_k]
                show(name, Shown(operand.quantized(), records))
            else:
                show(name, Shown(packed_rows(operand, used), None))


def show_rows(groups: ExpertGroups, fc1: torch.Tensor, act: torch.Tensor | None, fc2: torch.Tensor) -> None:
    """The rows in use, to a listener. Waits for the device then."""
    if not listened_to():
        return
    used = used_rows(groups)
    for name, tensor in (("fc1", fc1), ("swiglu", act), ("fc2", fc2)):
        assert tensor is not None
        show(name, tensor[used])


def used_rows(groups: ExpertGroups) -> torch.Tensor:
    """int64: the rows that are not padding, in the order of `kernels.routing.Routing`."""
    rows = groups.row_of_slot.flatten().long()
    return rows[rows >= 0].sort().values


def groups_of(tensors: Sequence[torch.Tensor]) -> ExpertGroups:
    """The inverse of `_group_tensors`, for groups aligned to ALIGN."""
    row_of_slot, slot_of_row, starts, counts, tile_expert = tensors
    return ExpertGroups(row_of_slot, slot_of_row, starts, counts, tile_expert)


def _group_tensors(groups: ExpertGroups) -> list[torch.Tensor]:
    return [groups.row_of_slot, groups.slot_of_row, groups.starts, groups.counts, groups.tile_expert]


def _count_bad(
    first: GroupedOperand, second: GroupedOperand, groups: ExpertGroups, bad: torch.Tensor
) -> None:
    """Adds to int64 [2, E] the rows of each expert that hold values that are not finite."""
    if groups.rows:
        _count[(groups.counts.shape[0], 2)](
            first.bad.view(torch.uint8),
            second.bad.view(torch.uint8),
            groups.starts,
            groups.counts,
            bad,
            BLOCK=4096,
        )


@triton.jit
def _count(first, second, starts, counts, found, BLOCK: tl.constexpr):
    e = tl.program_id(0)
    flags = first
    if tl.program_id(1) == 1:
        flags = second
    start = tl.load(starts + e)
    count = tl.load(counts + e)
    total = tl.zeros((BLOCK,), tl.int32)
    for i in range(0, count, BLOCK):
        own = i + tl.arange(0, BLOCK)
        total += tl.load(flags + start + own, mask=own < count, other=0).to(tl.int32)
    at = found + tl.program_id(1) * tl.num_programs(0) + e
    tl.store(at, tl.load(at) + tl.sum(total, axis=0).to(tl.int64))
