"""A token's expert outputs, weighted and summed in slot order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.spec import ExecutionSpec
from kernels.triton.codec import (
    bf16_high,
    bf16_low,
    end_behind_kernel_before,
    let_next_kernel_start,
    pack_bf16,
    wait_for_kernel_before,
    wait_until,
)
from kernels.triton.grouping import ExpertGroups
from kernels.triton.support import check_layer, words
from kernels.triton.tiles import TILE

_FEW = 512  # tokens up to which a token takes several programs


def combine(
    fc2: torch.Tensor,
    groups: ExpertGroups,
    topk_weights: torch.Tensor,
    spec: ExecutionSpec,
    *,
    overlap: bool = False,
    after: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """FC2's output bfloat16 [R, H] in grouped order and float32 [T, k] -> bfloat16 [T, H]; see `combine_rows`.

    after, with overlap and out: int32 [tiles], where programs of FC2, H / 128 of them for a tile of rows, count what
    they have finished: a token then waits for its own rows rather than for the end of that kernel. out: where the
    output goes; memory that no kernel of the layer reads or writes. Raises ValueError as `combine_rows`, and for
    `after` without these.
    """
    if len(fc2) != groups.rows:
        raise ValueError(f"groups have {groups.rows} rows, fc2 is {tuple(fc2.shape)}")
    if after is not None and (out is None or not overlap):
        raise ValueError("a token that waits for its own rows overlaps FC2, and needs memory of its own: out")
    tiles = None if after is None else (after, groups.align)
    return combine_rows(fc2, groups.row_of_slot, topk_weights, spec, overlap=overlap, after=tiles, out=out)


def combine_rows(
    fc2: torch.Tensor,
    row_of_slot: torch.Tensor,
    topk_weights: torch.Tensor,
    spec: ExecutionSpec,
    *,
    overlap: bool = False,
    after: tuple[torch.Tensor, int] | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """FC2's output bfloat16 [R, H], the row of each slot, int32 [T, k], and float32 [T, k] -> bfloat16 [T, H].

    bf16(fl(fl(p_0 y_0) + fl(p_1 y_1)) + ...): FP32, no fused multiply-add, one cast. A slot without a row (-1, for an
    expert id that does not exist) makes its token's output NaN. overlap: starts before the end of the kernel before
    this one, which makes fc2; row_of_slot and topk_weights, contiguous, must be complete before that one lets this one
    start. after, out: as for `combine`, with the rows of a tile. Raises ValueError for specs that combine otherwise,
    for another shape or type, and for overlap with other topk_weights.
    """
    check_layer(spec)
    tokens, top_k = row_of_slot.shape
    if fc2.dim() != 2 or fc2.dtype is not torch.bfloat16 or fc2.shape[1] == 0 or fc2.shape[1] % 2:
        raise ValueError(f"fc2 must be bfloat16 [R, H], H even, got {fc2.dtype} {tuple(fc2.shape)}")
    if topk_weights.shape != (tokens, top_k) or topk_weights.dtype is not torch.float32:
        found = f"{topk_weights.dtype} {tuple(topk_weights.shape)}"
        raise ValueError(f"topk_weights must be float32 {(tokens, top_k)}, got {found}")
    if overlap and not topk_weights.is_contiguous():
        raise ValueError("with overlap topk_weights must be contiguous: a copy would be too young")
    shape = (tokens, fc2.shape[1])
    output = torch.empty(shape, dtype=torch.bfloat16, device=fc2.device) if out is None else out
    if output.shape != shape or output.dtype is not torch.bfloat16 or not output.is_contiguous():
        raise ValueError(f"out must be contiguous bfloat16 {shape}, got {output.dtype} {tuple(output.shape)}")
    if not tokens:
        return output
    width = fc2.shape[1] // 2
    columns = min(1024 if tokens > _FEW else 256, triton.next_power_of_2(width))
    _combine[(tokens, triton.cdiv(width, columns))](
        words(fc2),
        row_of_slot,
        topk_weights.detach().contiguous(),
        output.view(torch.int32),
        row_of_slot if after is None else after[0],
        WIDTH=width,
        COLUMNS=columns,
        TOP_K=top_k,
        OVERLAP=overlap,
        AFTER=0 if after is None else fc2.shape[1] // TILE,
        ALIGN=1 if after is None else after[1],
        num_warps=4,
        enable_fp_fusion=False,
        launch_pdl=overlap,
    )
    return output


def collect(
    rows: torch.Tensor,
    row_of_slot: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    spec: ExecutionSpec,
) -> torch.Tensor:
    """As `kernels.slots.collect`, the same bits, in one pass over rows: FC2's, so that BF16 holds them."""
    return combine_rows(rows.to(torch.bfloat16), row_of_slot.int(), topk_weights, spec)


@triton.jit
def _combine(
    fc2,
    row_of_slot,
    coefficients,
    output,
    after,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOP_K: tl.constexpr,
    OVERLAP: tl.constexpr,
    AFTER: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """One token, some of its columns; fc2 [R, WIDTH] and output [T, WIDTH] are int32 words of BF16 pairs. AFTER > 0:
    waits until so many programs have finished the tiles, of ALIGN rows, of the token's rows.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < WIDTH
    low = tl.zeros((COLUMNS,), tl.float32)
    high = tl.zeros((COLUMNS,), tl.float32)
    rows = tl.tuple([])
    own_coefficients = tl.tuple([])
    for slot in tl.static_range(TOP_K):  # rows ahead of the wait, so past this processor's own cache
        rows += (tl.load(row_of_slot + token * TOP_K + slot, cache_modifier=".cg").to(tl.int64),)
        own_coefficients += (tl.load(coefficients + token * TOP_K + slot),)
    if AFTER > 0:
        let_next_kernel_start()
        slot = tl.arange(0, triton.next_power_of_2(TOP_K))
        own = row_of_slot + token * TOP_K + slot
        row = tl.load(own, mask=slot < TOP_K, other=-1, cache_modifier=".cg")
        wait_until(after + tl.maximum(row, 0) // ALIGN, tl.where(row >= 0, AFTER, 0))
    elif OVERLAP:
        wait_for_kernel_before()
    for slot in tl.static_range(TOP_K):
        row = rows[slot]
        coefficient = tl.where(row >= 0, own_coefficients[slot], float("nan"))
        word = tl.load(fc2 + row * WIDTH + column, mask=mask & (row >= 0), other=0).to(
            tl.uint32, bitcast=True
        )
        own_low = coefficient * bf16_low(word)
        own_high = coefficient * bf16_high(word)
        # The first term is not added to zero, which would turn -0 into +0.
        low = own_low if slot == 0 else low + own_low
        high = own_high if slot == 0 else high + own_high
    word = pack_bf16(low, high).to(tl.int32, bitcast=True)
    tl.store(output + token * WIDTH + column, word, mask=mask)
    if AFTER > 0:
        end_behind_kernel_before()
