"""Quantised rows in the order of an `ExpertGroups`: their buffers, and the pass that completes them.

Block scales stand in the tensor cores' order, which puts 4 bytes of a row beside those of other rows, while memory
takes whole sectors of 32 bytes: a small kernel of its own moves them, and clears padding.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.quantize import QuantizedTensor
from kernels.swizzle import swizzled_size, unswizzle_128x4
from kernels.triton.grouping import ExpertGroups
from kernels.triton.matrix import ExpertMatrix
from kernels.triton.tiles import TILE

BLOCK = 16


@dataclass(frozen=True, eq=False)
class GroupedOperand:
    """Quantised rows in the order of an `ExpertGroups` with R rows. Padding rows are zero; rows from starts[E] on are
    not written.

    codes: uint8 [R, K/2], the even element in the low nibble; None unless packed
    block_scales: uint8 [`swizzled_size(R, K/16)`], E4M3 bytes in the order of `kernels.swizzle`; None unless packed
    decoded: float16 [R, K], code times block scale, exact; None unless decoded
    outer_scales: float32 [R], the decode scale g; NaN for a row that holds values that are not finite, 0 in padding
    bad: bool [R], whether the row holds values that are not finite; its codes are then zero
    """

    codes: torch.Tensor | None
    block_scales: torch.Tensor | None
    decoded: torch.Tensor | None
    outer_scales: torch.Tensor
    bad: torch.Tensor


def empty_operand(groups: ExpertGroups, width: int, *, packed: bool, decoded: bool) -> GroupedOperand:
    """Buffers for rows of `width` elements. Raises ValueError when no form is asked for."""
    if not (packed or decoded):
        raise ValueError("ask for packed codes, decoded values or both")
    rows, device = groups.rows, groups.slot_of_row.device
    size = swizzled_size(rows, width // BLOCK)
    return GroupedOperand(
        torch.empty(rows, width // 2, dtype=torch.uint8, device=device) if packed else None,
        torch.empty(size, dtype=torch.uint8, device=device) if packed else None,
        torch.empty(rows, width, dtype=torch.float16, device=device) if decoded else None,
        torch.empty(rows, dtype=torch.float32, device=device),
        torch.empty(rows, dtype=torch.bool, device=device),
    )


def check_operand(
    elements: torch.Tensor,
    outer: torch.Tensor,
    weight: ExpertMatrix,
    groups: ExpertGroups,
    out: torch.Tensor,
    codes_per_element: int = 1,
) -> None:
    """Raises ValueError unless rows, weights, groups and output fit each other."""
    experts, features, width = weight.shape
    expected = {
        "elements": (elements, (groups.rows, width // codes_per_element)),
        "outer scales": (outer, (groups.rows,)),
        "expert counts": (groups.counts, (experts,)),
        "output": (out, (groups.rows, features)),
    }
    for name, (tensor, shape) in expected.items():
        if tuple(tensor.shape) != shape or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous {shape} for weights {weight.shape}, got {tuple(tensor.shape)}"
            )
    if out.dtype is not torch.bfloat16:
        raise ValueError(f"the output must be bfloat16, got {out.dtype}")
    if experts * features >= 2**31:
        raise ValueError(f"{experts} x {features} weight rows do not fit 32-bit row numbers")


def parts_for_4_bits(
    operand: GroupedOperand,
    weight: ExpertMatrix,
    groups: ExpertGroups,
    out: torch.Tensor,
    aligned: Collection[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a product that reads weights in 4 bits takes: the operand decoded, float16 [R, K], and the weight's words
    and block scales (float8_e4m3fn) in the order of `kernels.triton.tiles`. Raises ValueError for what lacks them, does
    not fit, or has groups aligned to none of `aligned`.
    """
    if weight.words is None or weight.word_scales is None or operand.decoded is None:
        raise ValueError(
            "products of 4-bit weights need a decoded operand and weights of multiples of"
            f" {TILE}, got {weight.shape}"
        )
    if groups.align not in aligned:
        raise ValueError(
            f"products of 4-bit weights need groups aligned to one of {list(aligned)}, got {groups.align}"
        )
    check_operand(operand.decoded, operand.outer_scales, weight, groups, out)
    return operand.decoded, weight.words, weight.word_scales.view(torch.float8_e4m3fn)


def packed_rows(operand: GroupedOperand, rows: torch.Tensor) -> QuantizedTensor:
    """Rows (int64) of a packed operand, their block scales in logical order. Raises ValueError for one that is not
    packed."""
    if operand.codes is None or operand.block_scales is None:
        raise ValueError("the operand is not packed")
    count, half = operand.codes.shape
    scales = unswizzle_128x4(operand.block_scales, count, half * 2 // BLOCK)
    return QuantizedTensor(operand.codes[rows], scales[rows], operand.outer_scales[rows, None])


def finish_tiles(
    result: GroupedOperand,
    groups: ExpertGroups,
    scales: torch.Tensor,
    outer: torch.Tensor,
    bad: torch.Tensor,
    top_k: int,
) -> None:
    """From the tokens' scales [T, K/16], g [T] and flags [T] to those of grouped rows; padding is cleared."""
    blocks = scales.shape[1]
    columns = triton.cdiv(blocks, 4)
    own = min(32, triton.next_power_of_2(columns))
    unused = scales
    _finish[(triton.cdiv(groups.rows, 128), triton.cdiv(columns, own))](
        scales,
        outer,
        bad,
        groups.slot_of_row,
        groups.starts,
        unused if result.block_scales is None else result.block_scales,
        result.outer_scales,
        result.bad.view(torch.uint8),
        unused if result.codes is None else result.codes.view(torch.int32),
        unused if result.decoded is None else result.decoded.view(torch.int32),
        groups.rows,
        EXPERTS=groups.counts.shape[0],
        BLOCKS=blocks,
        COLUMNS=own,
        TOP_K=top_k,
        PACKED=result.codes is not None,
        DECODED=result.decoded is not None,
        num_warps=4,
    )


@triton.jit
def count_bad(bad_counts, expert, mask, ROWS: tl.constexpr):
    """One more for these experts, where mask says so."""
    tl.atomic_add(bad_counts + expert, tl.full((ROWS,), 1, tl.int64), mask=mask)


@triton.jit
def _finish(
    scales,
    outer,
    bad,
    slot_of_row,
    starts,
    swizzled,
    row_outer,
    row_bad,
    codes,
    decoded,
    rows,
    EXPERTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOP_K: tl.constexpr,
    PACKED: tl.constexpr,
    DECODED: tl.constexpr,
):
    """A tile of 128 rows by COLUMNS columns of four blocks. TOP_K = 0: the scales are those of the grouped rows."""
    tile_number = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * COLUMNS
    row = tile_number * 128 + tl.arange(0, 128)
    if tile_number * 128 < tl.load(starts + EXPERTS):
        slot = tl.load(slot_of_row + row, mask=row < rows, other=-1)
        routed = slot >= 0
        if TOP_K == 0:
            source = row
        else:
            source = (slot // TOP_K).to(tl.int64)
            if first == 0:
                g = tl.load(outer + source, mask=routed, other=0.0)
                tl.store(row_outer + row, g, mask=row < rows)
                flag = tl.load(bad + source, mask=routed, other=0)
                tl.store(row_bad + row, flag, mask=row < rows)
        if PACKED:
            block = first * 4 + tl.arange(0, COLUMNS * 4)
            mask = routed[:, None] & (block < BLOCKS)[None, :]
            found = tl.load(scales + source[:, None] * BLOCKS + block[None, :], mask=mask, other=0)
            # [row // 32, row % 32, column, block % 4] -> the order of kernels.swizzle
            found = tl.permute(tl.reshape(found, (4, 32, COLUMNS, 4)), (2, 1, 0, 3))
            column = first + tl.arange(0, COLUMNS)
            to = (tile_number * ((BLOCKS + 3) // 4) + column[:, None]) * 512 + tl.arange(0, 512)[None, :]
            tl.store(
                swizzled + to, tl.reshape(found, (COLUMNS, 512)), mask=(column < (BLOCKS + 3) // 4)[:, None]
            )
        if TOP_K > 0 and tl.min(slot, axis=0) < 0:
            for start in range(0, 128, 8):
                own = tile_number * 128 + start + tl.arange(0, 8)
                empty = (tl.load(slot_of_row + own, mask=own < rows, other=0) < 0) & (own < rows)
                if tl.max(empty.to(tl.int32), axis=0) > 0:
                    if PACKED:
                        _clear(codes, own, empty, first * 8, BLOCKS * 2, COLUMNS * 8)
                    if DECODED:
                        _clear(decoded, own, empty, first * 32, BLOCKS * 8, COLUMNS * 32)


@triton.jit
def _clear(target, row, empty, first, WIDTH: tl.constexpr, COUNT: tl.constexpr):
    """Zeros in COUNT int32 words from the word `first` on, up to WIDTH, of some rows."""
    word = first + tl.arange(0, COUNT)
    mask = empty[:, None] & (word < WIDTH)[None, :]
    tl.store(target + row[:, None] * WIDTH + word[None, :], tl.zeros((8, COUNT), tl.int32), mask=mask)
