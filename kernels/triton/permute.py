"""Rows moved to the order of an `ExpertGroups` as they are, and padding cleared."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.codec import as_stored, to_bf16, to_f32
from kernels.triton.grouping import ExpertGroups

_ROWS = 16  # of a program of `_clear_padding`


def permute(x: torch.Tensor, groups: ExpertGroups) -> torch.Tensor:
    """[T, H], bfloat16 or float32 -> each slot's row in bfloat16, [R, H]: rounded to nearest even, zero in padding;
    rows from starts[E] on are not written. A token's row is read once. Raises ValueError for another number of tokens.
    """
    tokens, top_k = groups.row_of_slot.shape
    if x.dim() != 2 or len(x) != tokens:
        raise ValueError(f"groups are of {tokens} tokens, x is {tuple(x.shape)}")
    width = x.shape[1]
    rows = torch.empty(groups.rows, width, dtype=torch.bfloat16, device=x.device)
    if not tokens:
        return rows
    padded = triton.next_power_of_2(width)
    _permute[(tokens,)](
        x.detach().contiguous(),
        groups.row_of_slot,
        as_stored(rows),
        H=width,
        PADDED=padded,
        TOP_K=top_k,
        num_warps=4 if padded <= 4096 else 8,
    )
    clear_padding(rows, groups)
    return rows


def clear_padding(rows: torch.Tensor, groups: ExpertGroups) -> None:
    """Zero in the rows of bfloat16 [R, H] that have no slot, up to the last row in use."""
    width = rows.shape[1]
    _clear_padding[(triton.cdiv(groups.rows, _ROWS),)](
        groups.slot_of_row,
        groups.starts,
        as_stored(rows),
        groups.rows,
        EXPERTS=groups.counts.shape[0],
        H=width,
        PADDED=triton.next_power_of_2(width),
        ROWS=_ROWS,
    )


@triton.jit
def _permute(x, row_of_slot, rows, H: tl.constexpr, PADDED: tl.constexpr, TOP_K: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    inside = column < H
    own = to_bf16(to_f32(tl.load(x + token * H + column, mask=inside, other=0.0)))
    for slot in tl.static_range(TOP_K):
        row = tl.load(row_of_slot + token * TOP_K + slot).to(tl.int64)
        tl.store(rows + row * H + column, own, mask=inside & (row >= 0))


@triton.jit
def _clear_padding(
    slot_of_row,
    starts,
    cleared,
    rows,
    EXPERTS: tl.constexpr,
    H: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    used = row < tl.minimum(tl.load(starts + EXPERTS), rows)
    empty = used & (tl.load(slot_of_row + row, mask=used, other=0) < 0)
    if tl.max(empty.to(tl.int32), axis=0) > 0:
        column = tl.arange(0, PADDED)
        at = row.to(tl.int64)[:, None] * H + column[None, :]
        mask = empty[:, None] & (column < H)[None, :]
        tl.store(cleared + at, to_bf16(tl.zeros((ROWS, PADDED), tl.float32)), mask=mask)
