"""Token slots grouped by expert on the device: counts, offsets and both directions of the permutation.

Nothing here waits for the device, and all sizes on the host are functions of shapes, so that it can be captured in a
CUDA graph. Every expert's rows start at a multiple of `align`; the rows between are padding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from kernels.triton.codec import wait_for_kernel_before

ALIGN = 128
_CHUNK = 32  # slots that one program ranks against each other
_SCAN = 1024
_TILES = 64  # tiles whose expert one program finds
_FEW = 4096  # slots up to which every expert's program reads all of them: one launch
_READ = 1024  # of them at a time


@dataclass(frozen=True, eq=False)
class ExpertGroups:
    """T tokens with k slots each, grouped for E experts in R rows (R counts on the host, and is an upper bound).

    row_of_slot: int32 [T, k], the grouped row of slot (t, j); -1 where the expert's id is not in [0, E). The slots of
        an expert stand in ascending slot number, as `kernels.routing.Routing` orders them
    slot_of_row: int32 [R], slot number t*k + j of each grouped row; -1 in padding and behind the last row in use
    starts: int32 [E + 1], first grouped row of each expert, multiples of `align`; starts[E]: the rows in use
    counts: int32 [E], slots of each expert
    tile_expert: int32 [R / align], the expert of each tile of `align` rows; -1 from starts[E] on
    ids: the integers [T, k] that were grouped, contiguous; None where groups are put together from the other tensors.
        Held, since a copy's memory could otherwise be written while the groups are made
    finished: int32 [3, R / align or some more], zeros, where programs of FC1, SwiGLU and FC2 count what they have
        finished of each tile, for the next step of few rows: once, in one pass. None where there are many slots
    """

    row_of_slot: torch.Tensor
    slot_of_row: torch.Tensor
    starts: torch.Tensor
    counts: torch.Tensor
    tile_expert: torch.Tensor
    align: int = ALIGN
    ids: torch.Tensor | None = None
    finished: torch.Tensor | None = None

    @property
    def rows(self) -> int:
        """R."""
        return self.slot_of_row.shape[0]

    def expert_of_row(self) -> torch.Tensor:
        """int64 [R], the expert of each row; 0 behind the last row in use."""
        return self.tile_expert.long().clamp(min=0).repeat_interleave(self.align)


def capacity(slots: int, num_experts: int, align: int = ALIGN) -> int:
    """R: enough rows for every distribution of so many slots over the experts."""
    worst = slots + num_experts * (align - 1)
    return min(-(-worst // align) * align, slots * align)


def group(topk_ids: torch.Tensor, num_experts: int, align: int = ALIGN) -> ExpertGroups:
    """Group the slots of integer [T, k] by expert; T may be 0.

    Ids are not checked, since that would wait for the device: a slot whose id is not in [0, num_experts) has no row.
    Raises ValueError for another shape or type, for `align` that is no power of two, and for 2^31 rows and more.
    """
    if topk_ids.dim() != 2 or topk_ids.shape[1] == 0 or topk_ids.dtype not in (torch.int32, torch.int64):
        found = f"{topk_ids.dtype} {tuple(topk_ids.shape)}"
        raise ValueError(f"topk_ids must be int32 or int64 [T, k] with k >= 1, got {found}")
    if num_experts < 1 or align < 1 or align & (align - 1):
        raise ValueError(f"needs experts and a power of two, got {num_experts} experts and align={align}")
    slots, device = topk_ids.numel(), topk_ids.device
    rows = capacity(slots, num_experts, align)
    if rows >= 2**31:
        raise ValueError(f"{rows} grouped rows do not fit 32-bit row numbers")

    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    chunks, tiles = -(-slots // _CHUNK), rows // align
    ids = topk_ids.contiguous()
    groups = ExpertGroups(
        ints(*topk_ids.shape), ints(rows), ints(num_experts + 1), ints(num_experts), ints(tiles), align, ids
    )
    if slots <= _FEW:
        finished = ints(3, -(-tiles // 4) * 4)  # each step's counts are aligned to 16 bytes
        groups = replace(groups, finished=finished)
        _group_few[(num_experts,)](
            ids,
            groups.row_of_slot,
            groups.slot_of_row,
            groups.starts,
            groups.counts,
            groups.tile_expert,
            finished,
            slots,
            rows,
            E=num_experts,
            PADDED=triton.next_power_of_2(num_experts),
            ALIGN=align,
            BLOCK=min(_READ, max(32, triton.next_power_of_2(slots))),
            num_warps=4,
            launch_pdl=True,
        )
        return groups
    ranks, before = ints(slots), torch.zeros(num_experts, chunks, dtype=torch.int32, device=device)
    _rank[(chunks,)](ids, ranks, before, slots, num_experts, chunks, CHUNK=_CHUNK, num_warps=1)
    _scan[(num_experts,)](before, groups.counts, chunks, BLOCK=_SCAN, num_warps=4)
    _offsets[(max(1, -(-tiles // _TILES)),)](
        groups.counts,
        groups.starts,
        groups.tile_expert,
        groups.slot_of_row,
        tiles,
        E=num_experts,
        PADDED=triton.next_power_of_2(num_experts),
        ALIGN=align,
        TILES=_TILES,
        num_warps=4,
    )
    _place[(chunks,)](
        ids,
        ranks,
        before,
        groups.starts,
        groups.row_of_slot,
        groups.slot_of_row,
        slots,
        num_experts,
        chunks,
        CHUNK=_CHUNK,
        num_warps=1,
    )
    return groups


@triton.jit
def load_ids(ids, slot, slots, num_experts):
    """Expert ids; those that do not exist are -1."""
    found = tl.load(ids + slot, mask=slot < slots, other=-1)
    return tl.where((found >= 0) & (found < num_experts), found, -1).to(tl.int32)


@triton.jit
def _group_few(
    ids,
    row_of_slot,
    slot_of_row,
    starts,
    counts,
    tile_expert,
    finished,
    slots,
    rows,
    E: tl.constexpr,
    PADDED: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """All of a grouping for one expert; each program counts every expert's slots, so that none waits for another."""
    wait_for_kernel_before()
    expert = tl.program_id(0)
    bins = tl.arange(0, PADDED)
    total = tl.zeros((PADDED,), tl.int32)
    for first in range(0, slots, BLOCK):
        slot = first + tl.arange(0, BLOCK)
        found = load_ids(ids, slot, slots, E)
        total += tl.histogram(found, PADDED, mask=found >= 0)
    tiles = (total + ALIGN - 1) // ALIGN
    start = tl.sum(tl.where(bins < expert, tiles, 0), axis=0) * ALIGN
    count = tl.sum(tl.where(bins == expert, total, 0), axis=0)
    end = start + (count + ALIGN - 1) // ALIGN * ALIGN
    tl.store(starts + expert, start)
    tl.store(counts + expert, count)
    done = start
    for first in range(0, slots, BLOCK):
        slot = first + tl.arange(0, BLOCK)
        found = load_ids(ids, slot, slots, E)
        own = found == expert
        row = done + tl.cumsum(own.to(tl.int32), axis=0) - 1
        tl.store(row_of_slot + slot, row, mask=own)
        tl.store(slot_of_row + row, slot, mask=own)
        done += tl.sum(own.to(tl.int32), axis=0)
        if expert == 0:
            tl.store(row_of_slot + slot, tl.full((BLOCK,), -1, tl.int32), mask=(slot < slots) & (found < 0))
    _fill(slot_of_row, start + count, end, -1, ALIGN)
    _fill(tile_expert, start // ALIGN, end // ALIGN, expert, 32)
    padded_tiles = (rows // ALIGN + 3) // 4 * 4
    last = tl.where(expert == E - 1, padded_tiles, end // ALIGN)
    for step in tl.static_range(3):
        _fill(finished + step * padded_tiles, start // ALIGN, last, 0, 32)
    if expert == E - 1:
        tl.store(starts + E, end)
        _fill(slot_of_row, end, rows, -1, BLOCK)
        _fill(tile_expert, end // ALIGN, rows // ALIGN, -1, 32)


@triton.jit
def load_some_ids(ids, first, slots, COUNT: tl.constexpr, E: tl.constexpr):
    """The experts of COUNT slots from `first` on, -1 for none: a tuple of int32."""
    experts = tl.tuple([])
    for i in tl.static_range(COUNT):
        experts += (load_ids(ids, first + i, slots, E),)
    return experts


@triton.jit
def rows_of_slots(found, experts, first, PADDED: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr):
    """The grouped rows of slots from `first` on, as `_group_few` has them in row_of_slot: a tuple of int32.

    found: the experts of all slots, int32 [BLOCK]; experts: those of the slots in question, a tuple. -1 for none.
    """
    slot = tl.arange(0, BLOCK)
    bins = tl.arange(0, PADDED)
    sizes = (tl.histogram(found, PADDED, mask=found >= 0) + ALIGN - 1) // ALIGN * ALIGN
    rows = tl.tuple([])
    for i in tl.static_range(len(experts)):
        start = tl.sum(tl.where(bins < experts[i], sizes, 0), axis=0)
        earlier = (found == experts[i]) & (slot < first + i)
        rows += (tl.where(experts[i] >= 0, start + tl.sum(earlier.to(tl.int32), axis=0), -1),)
    return rows


@triton.jit
def _fill(target, first, end, value, BLOCK: tl.constexpr):
    for start in range(first, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(target + at, tl.zeros((BLOCK,), tl.int32) + value, mask=at < end)


@triton.jit
def _rank(ids, ranks, counts, slots, num_experts, chunks, CHUNK: tl.constexpr):
    """A slot's number among the slots of its expert in its chunk; counts [E, chunks] of the experts that occur."""
    chunk = tl.program_id(0)
    own = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = load_ids(ids, own, slots, num_experts)
    other = chunk * CHUNK + tl.arange(0, CHUNK)
    same = expert[:, None] == load_ids(ids, other, slots, num_experts)[None, :]
    earlier = same & (other[None, :] < own[:, None])
    rank = tl.sum(earlier.to(tl.int32), axis=1)
    tl.store(ranks + own, rank, mask=own < slots)
    count = tl.sum(same.to(tl.int32), axis=1)
    first = (rank == 0) & (expert >= 0)
    tl.store(counts + expert.to(tl.int64) * chunks + chunk, count, mask=first)


@triton.jit
def _scan(counts, totals, chunks, BLOCK: tl.constexpr):
    """counts [E, chunks] -> the sum over the chunks before each, in place, and over all of them [E]."""
    expert = tl.program_id(0)
    base = counts + expert.to(tl.int64) * chunks
    total = 0
    for start in range(0, chunks, BLOCK):
        chunk = start + tl.arange(0, BLOCK)
        count = tl.load(base + chunk, mask=chunk < chunks, other=0)
        tl.store(base + chunk, total + tl.cumsum(count, axis=0) - count, mask=chunk < chunks)
        total += tl.sum(count, axis=0)
    tl.store(totals + expert, total)


@triton.jit
def _offsets(
    counts,
    starts,
    tile_expert,
    slot_of_row,
    tiles,
    E: tl.constexpr,
    PADDED: tl.constexpr,
    ALIGN: tl.constexpr,
    TILES: tl.constexpr,
):
    """First tile of each expert, the expert of some tiles, and slot_of_row = -1 in these."""
    expert = tl.arange(0, PADDED)
    count = tl.load(counts + expert, mask=expert < E, other=0)
    own = (count + ALIGN - 1) // ALIGN
    end = tl.cumsum(own, axis=0)
    if tl.program_id(0) == 0:
        tl.store(starts + expert, (end - own) * ALIGN, mask=expert < E)
        tl.store(starts + E, tl.sum(own, axis=0) * ALIGN)
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    # The number of experts that end at or before the tile is the tile's expert; empty experts are counted over.
    passed = (end[None, :] <= tile[:, None]) & (expert < E)[None, :]
    found = tl.sum(passed.to(tl.int32), axis=1)
    tl.store(tile_expert + tile, tl.where(found < E, found, -1), mask=tile < tiles)
    row = tl.program_id(0) * (TILES * ALIGN) + tl.arange(0, TILES * ALIGN)
    tl.store(slot_of_row + row, tl.full((TILES * ALIGN,), -1, tl.int32), mask=row < tiles * ALIGN)


@triton.jit
def _place(
    ids, ranks, before, starts, row_of_slot, slot_of_row, slots, num_experts, chunks, CHUNK: tl.constexpr
):
    """Both directions of the permutation."""
    chunk = tl.program_id(0)
    slot = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = load_ids(ids, slot, slots, num_experts)
    routed = expert >= 0
    row = tl.load(starts + expert, mask=routed, other=0)
    row += tl.load(before + expert.to(tl.int64) * chunks + chunk, mask=routed, other=0)
    row += tl.load(ranks + slot, mask=routed, other=0)
    tl.store(row_of_slot + slot, tl.where(routed, row, -1), mask=slot < slots)
    tl.store(slot_of_row + row, slot, mask=routed)
