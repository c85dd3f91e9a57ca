"""Slots grouped by expert as `kernels.triton.grouping` does it, few enough for a single program: one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.grouping import ExpertGroups, capacity

MAX_SLOTS, MAX_EXPERTS = 1024, 256


def group_few(topk_ids: torch.Tensor, num_experts: int, align: int) -> ExpertGroups:
    """As `kernels.triton.grouping.group`. Raises ValueError for more than MAX_SLOTS slots or MAX_EXPERTS experts."""
    slots, device = topk_ids.numel(), topk_ids.device
    if not 0 < slots <= MAX_SLOTS or num_experts > MAX_EXPERTS:
        raise ValueError(
            f"needs 1 to {MAX_SLOTS} slots and at most {MAX_EXPERTS} experts, got {slots} and {num_experts}"
        )
    rows = capacity(slots, num_experts, align)
    sizes = (slots, rows, num_experts + 1, num_experts, rows // align)
    row_of_slot, *others = torch.empty(sum(sizes), dtype=torch.int32, device=device).split(sizes)
    groups = ExpertGroups(row_of_slot.view(topk_ids.shape), *others, align)
    _group[(1,)](
        topk_ids.contiguous(),
        groups.row_of_slot,
        groups.slot_of_row,
        groups.starts,
        groups.counts,
        groups.tile_expert,
        slots,
        rows,
        E=num_experts,
        EXPERTS=triton.next_power_of_2(num_experts),
        SLOTS=triton.next_power_of_2(slots),
        TILES=triton.next_power_of_2(rows // align),
        ALIGN=align,
        num_warps=8,
    )
    return groups


@triton.jit
def _group(
    ids,
    row_of_slot,
    slot_of_row,
    starts,
    counts,
    tile_expert,
    slots,
    rows,
    E: tl.constexpr,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
    TILES: tl.constexpr,
    ALIGN: tl.constexpr,
):
    slot = tl.arange(0, SLOTS)
    found = tl.load(ids + slot, mask=slot < slots, other=-1)
    routed = (found >= 0) & (found < E)
    expert = tl.where(routed, found, -1).to(tl.int32)
    number = tl.arange(0, EXPERTS)
    own = expert[:, None] == number[None, :]
    count = tl.sum(own.to(tl.int32), axis=0)
    padded = (count + ALIGN - 1) // ALIGN * ALIGN
    end = tl.cumsum(padded, axis=0)
    tl.store(starts + number, end - padded, mask=number < E)
    tl.store(starts + E, tl.sum(padded, axis=0))
    tl.store(counts + number, count, mask=number < E)
    first = tl.sum(tl.where(own, (end - padded)[None, :], 0), axis=1)
    rank = tl.zeros((SLOTS,), tl.int32)
    for start in range(0, slots, 32):
        earlier = start + tl.arange(0, 32)
        other = tl.load(ids + earlier, mask=earlier < slots, other=-1).to(tl.int32)
        before = (other[None, :] == expert[:, None]) & (earlier[None, :] < slot[:, None])
        rank += tl.sum(before.to(tl.int32), axis=1)
    row = first + rank
    tl.store(row_of_slot + slot, tl.where(routed, row, -1), mask=slot < slots)
    tile = tl.arange(0, TILES)
    passed = (end[None, :] <= tile[:, None] * ALIGN) & (number < E)[None, :]
    behind = tl.sum(passed.to(tl.int32), axis=1)
    inside = tile < rows // ALIGN
    tl.store(tile_expert + tile, tl.where(behind < E, behind, -1), mask=inside)
    at = tile[:, None] * ALIGN + tl.arange(0, ALIGN)[None, :]
    tl.store(slot_of_row + at, tl.full((TILES, ALIGN), -1, tl.int32), mask=inside[:, None])
    tl.debug_barrier()  # other threads wrote those rows
    tl.store(slot_of_row + row, slot, mask=routed)
