"""Rows packed for their way between processes: quantised into records, and records taken apart in grouped order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.packed_rows import BLOCK, PackedRows, flag_at, record_size, scales_at
from kernels.quantizer_spec import QuantizerSpec
from kernels.triton.block import decoded_words
from kernels.triton.grouping import ExpertGroups
from kernels.triton.operand import GroupedOperand, count_bad, empty_operand
from kernels.triton.quantize import quantize_rows, tile
from kernels.triton.support import check_bad_counts, plain


def pack_rows(x: torch.Tensor, spec: QuantizerSpec) -> PackedRows:
    """bfloat16 or float32 [R, K] -> a record for each row, the very bytes of `kernels.reference.pack_rows` where values
    are finite. Does not wait for the device. Raises ValueError as `quantize_rows` does for what it does not compute.
    """
    found: list[torch.Tensor] = []
    quantized = quantize_rows(x, spec, on_non_finite=found.append)
    return PackedRows.of(quantized, found[0])


def permute_packed(
    rows: PackedRows, groups: ExpertGroups, bad_counts: torch.Tensor | None = None
) -> GroupedOperand:
    """T packed rows -> the operand of every slot in grouped order, decoded: what
    `kernels.triton.quantize.permute_quantize` makes of the rows themselves, bit for bit.

    bad_counts: int64 [E], to which the number of each expert's rows that are not finite is added; padding is then left
    as it is. Does not wait for the device. Raises ValueError for records of another size and for groups of another
    number of tokens.
    """
    tokens, top_k = groups.row_of_slot.shape
    count, width = rows.shape
    if count != tokens:
        raise ValueError(f"groups are of {tokens} tokens, there are {count} packed rows")
    records = plain(rows.records)
    if records.dtype is not torch.uint8 or records.shape[1:] != (record_size(width),):
        found = f"{records.dtype} {tuple(records.shape)}"
        raise ValueError(f"records of {width} elements must be uint8 [R, {record_size(width)}], got {found}")
    check_bad_counts(bad_counts, groups.counts.shape[0], records.device)
    result = empty_operand(groups, width, packed=False, decoded=True)
    if not tokens:
        return result
    assert result.decoded is not None
    blocks = width // BLOCK
    own = tile(blocks)
    bad = result.bad.view(torch.uint8)
    _permute_packed[(triton.cdiv(groups.rows, own.rows),)](
        records,
        records.view(torch.int32),
        rows.index.contiguous(),
        groups.slot_of_row,
        groups.starts,
        groups.tile_expert,
        result.decoded.view(torch.int32),
        result.outer_scales,
        bad,
        bad if bad_counts is None else bad_counts,
        groups.rows,
        EXPERTS=groups.counts.shape[0],
        BLOCKS=blocks,
        PADDED=triton.next_power_of_2(blocks),
        ROWS=own.rows,
        TOP_K=top_k,
        RECORD=record_size(width),
        OUTER=width // 2,
        SCALES=scales_at(width),
        FLAG=flag_at(width),
        ALIGN=0 if bad_counts is None else groups.align,
        num_warps=own.warps,
    )
    return result


@triton.jit
def _permute_packed(
    records,
    words,
    index,
    slot_of_row,
    starts,
    tile_expert,
    decoded,
    outer,
    bad,
    bad_counts,
    rows,
    EXPERTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    TOP_K: tl.constexpr,
    RECORD: tl.constexpr,
    OUTER: tl.constexpr,
    SCALES: tl.constexpr,
    FLAG: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """ROWS grouped rows. records uint8 [R, RECORD], and the same memory as int32 words; OUTER, SCALES, FLAG: bytes of a
    record; decoded: int32 (f16 pairs) [rows, 8 BLOCKS]. ALIGN > 0: padding is left alone, and rows that are not finite
    are counted for the experts of tiles of ALIGN rows.
    """
    first = tl.program_id(0) * ROWS
    if first < tl.load(starts + EXPERTS):
        row = first + tl.arange(0, ROWS)
        slot = tl.load(slot_of_row + row, mask=row < rows, other=-1)
        routed = slot >= 0
        inside = routed if ALIGN > 0 else row < rows
        record = tl.load(index + slot // TOP_K, mask=routed, other=0).to(tl.int64)
        block = tl.arange(0, PADDED)
        mask = routed[:, None] & (block < BLOCKS)[None, :]
        scale = tl.load(records + record[:, None] * RECORD + (SCALES + block)[None, :], mask=mask, other=0)
        word = words + record * (RECORD // 4)
        pair = word[:, None, None] + block[None, :, None] * 2 + tl.arange(0, 2)[None, None, :]
        codes = tl.load(pair, mask=mask[:, :, None], other=0).to(tl.uint32, bitcast=True)
        c0, c1 = tl.split(codes)
        g = tl.load(word + OUTER // 4, mask=routed, other=0).to(tl.float32, bitcast=True)
        flag = tl.load(records + record * RECORD + FLAG, mask=routed, other=0)
        row = row.to(tl.int64)
        tl.store(outer + row, g, mask=inside)
        tl.store(bad + row, flag, mask=inside)
        if ALIGN > 0:
            wrong = routed & (flag > 0)
            expert = tl.load(tile_expert + row // ALIGN, mask=wrong, other=0)
            count_bad(bad_counts, expert, wrong, ROWS)
        element = tl.arange(0, PADDED * 8)
        to = row[:, None] * (BLOCKS * 8) + element[None, :]
        f16_words = decoded_words(c0, c1, scale.to(tl.uint32), ROWS, PADDED)
        tl.store(decoded + to, f16_words, mask=inside[:, None] & (element < BLOCKS * 8)[None, :])
