"""Rows quantised, and rows permuted to their experts and quantised in one pass, as `minite` says.

A program has whole rows in registers: their largest magnitudes are known after one read. `permute_quantize` reads and
quantises each token's row once and writes it to its k grouped rows; `kernels.triton.operand` completes what is small.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.quantize import NonFiniteReport, QuantizedTensor
from kernels.quantizer_spec import QuantizerSpec, ScaleDomain
from kernels.triton.block import (
    block_scale,
    codes_of_bf16,
    decoded_words,
    element_divisor,
    encode_f32,
    largest_of_block_bf16,
    largest_of_four_f32,
    load_four,
    outer_scale,
)
from kernels.triton.codec import wait_for_kernel_before
from kernels.triton.grouping import ExpertGroups, load_ids, load_some_ids, rows_of_slots
from kernels.triton.operand import BLOCK, GroupedOperand, count_bad, empty_operand, finish_tiles
from kernels.triton.support import check_bad_counts, check_quantizer, check_rows, is_plain, words

_COPIES_OF_FEW = 2  # grouped rows that a program writes of a token's where there are few tokens
_OWN_SLOTS = (
    512  # and experts, up to which a program finds its rows itself, instead of waiting for the groups
)
_ROW_DOMAINS = (ScaleDomain.TOKEN, ScaleDomain.ROW)


@dataclass(frozen=True)
class Tile:
    """How many rows a program takes, with how many warps."""

    rows: int
    warps: int


def tile(blocks: int) -> Tile:
    """For rows of `blocks` blocks: a few blocks for each thread, within one warp as long as that is so."""
    padded = triton.next_power_of_2(blocks)
    return Tile(max(1, 128 // padded), max(1, min(16, padded // 128)))


def tile_of_few(blocks: int) -> Tile:
    """For so few rows that a program a row leaves most of the device idle: one block for each thread."""
    return Tile(1, max(1, min(16, triton.next_power_of_2(blocks) // 32)))


def quantize_rows(
    x: torch.Tensor,
    spec: QuantizerSpec,
    *,
    what: str = "activation",
    on_non_finite: NonFiniteReport | None = None,
) -> QuantizedTensor:
    """As `kernels.quantize.quantize_activation`: bfloat16 or float32 [R, K] -> codes, scales in their logical order.

    on_non_finite: takes a bool [R] of the rows that hold values that are not finite, without waiting for the device;
    the result is then meaningless. Raises ValueError for specs other than `minite`'s, for another shape or type,
    and, without on_non_finite, for values that are not finite.
    """
    check_quantizer(spec, _ROW_DOMAINS)
    check_rows(x, what)
    rows, width = x.shape
    codes = torch.empty(rows, width // 2, dtype=torch.uint8, device=x.device)
    scales = torch.empty(rows, width // BLOCK, dtype=torch.uint8, device=x.device)
    outer = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    bad = torch.empty(rows, dtype=torch.uint8, device=x.device)
    launch_rows(x, codes, scales, outer, bad)
    report(bad.view(torch.bool), x, what, on_non_finite)
    return QuantizedTensor(codes, scales, outer)


def report(
    bad: torch.Tensor, x: torch.Tensor, what: str, on_non_finite: NonFiniteReport | None = None
) -> None:
    """Hand on the rows that are not finite, or wait for the device and raise ValueError when there are any."""
    if on_non_finite is not None:
        on_non_finite(bad)
    elif bool(bad.any()):
        nan, inf = int(x.isnan().sum()), int(x.isinf().sum())
        raise ValueError(
            f"cannot quantise {what} {tuple(x.shape)}: {nan} NaN and {inf} infinite values among {x.numel()}"
        )


def launch_rows(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    outer: torch.Tensor,
    bad: torch.Tensor,
    amax: torch.Tensor | None = None,
    rows_of_group: int = 1,
) -> None:
    """Quantise [R, K] into buffers of the shapes that `quantize_rows` has.

    amax: int32 FP32 bits of A for each group of `rows_of_group` rows, which share one element of `outer`; without it
    every row has its own. K is a multiple of 16.
    """
    rows, width = x.shape
    if not rows:
        return
    blocks = width // BLOCK
    own = tile(blocks)
    _quantize[(triton.cdiv(rows, own.rows),)](
        words(x),
        codes.view(torch.int32),
        codes,
        scales,
        outer,
        bad,
        bad if amax is None else amax,
        bad,
        bad,
        bad,
        bad,
        rows,
        rows_of_group,
        BLOCKS=blocks,
        PADDED=triton.next_power_of_2(blocks),
        ROWS=own.rows,
        TOP_K=0,
        COPIES=1,
        EXPERTS=0,
        SLOTS=0,
        BF16=x.dtype is torch.bfloat16,
        SHARED=amax is not None,
        PACKED=True,
        DECODED=False,
        ALIGN=0,
        num_warps=own.warps,
        enable_fp_fusion=False,
    )


def permute_quantize(
    x: torch.Tensor,
    groups: ExpertGroups,
    spec: QuantizerSpec,
    *,
    packed: bool,
    decoded: bool,
    bad_counts: torch.Tensor | None = None,
) -> GroupedOperand:
    """[T, K], bfloat16 or float32 -> the quantised rows of every slot in grouped order, in the forms asked for.

    Does not wait for the device: rows that are not finite are marked in `bad`. bad_counts: int64 [E], to which the
    number of each expert's rows that are not finite is added; padding is then left as it is, and all is one launch,
    which overlaps the kernel before it. `groups` must then be what was made last, after x: up to 512 slots and experts
    each program finds its rows from the ids and stores them while `group` still runs. Nothing else runs then, since
    `group` waits for all that is older before it lets this one start: no kernel is left that could use memory which
    was freed and is now the result's. Raises ValueError for specs other than `minite`'s, for another shape or type, for
    groups of another number of tokens, when no form is asked for, and for packed codes with bad_counts.
    """
    check_quantizer(spec, _ROW_DOMAINS)
    check_rows(x, "activation")
    check_bad_counts(bad_counts, groups.counts.shape[0], x.device)
    if packed and bad_counts is not None:
        raise ValueError(
            "block scales in the tensor cores' order take a second launch: packed is not for few rows"
        )
    if bad_counts is not None and not is_plain(x):
        raise ValueError(
            "with bad_counts x must be contiguous and aligned to 16 bytes: a copy would be too young"
        )
    tokens, top_k = groups.row_of_slot.shape
    if len(x) != tokens:
        raise ValueError(f"groups are of {tokens} tokens, x is {tuple(x.shape)}")
    width, device = x.shape[1], x.device
    blocks = width // BLOCK
    result = empty_operand(groups, width, packed=packed, decoded=decoded)
    if not tokens:
        return result
    direct = bad_counts is not None
    own = tile_of_few(blocks) if direct else tile(blocks)
    token_scales = torch.empty(0 if direct else tokens, blocks, dtype=torch.uint8, device=device)
    token_outer, token_bad = result.outer_scales, result.bad.view(torch.uint8)
    if not direct:
        token_outer = torch.empty(tokens, dtype=torch.float32, device=device)
        token_bad = torch.empty(tokens, dtype=torch.uint8, device=device)
    copies = min(_COPIES_OF_FEW, top_k) if direct else top_k
    slots, experts = tokens * top_k, groups.counts.shape[0]
    alone = direct and groups.ids is not None and max(slots, experts) <= _OWN_SLOTS
    _quantize[(triton.cdiv(tokens, own.rows), triton.cdiv(top_k, copies))](
        words(x),
        token_scales if result.codes is None else result.codes.view(torch.int32),
        token_scales if result.decoded is None else result.decoded.view(torch.int32),
        token_scales,
        token_outer,
        token_bad,
        token_bad,
        groups.row_of_slot if groups.ids is None else groups.ids,
        groups.row_of_slot,
        groups.tile_expert,
        token_bad if bad_counts is None else bad_counts,
        tokens,
        1,
        BLOCKS=blocks,
        PADDED=triton.next_power_of_2(blocks),
        ROWS=own.rows,
        TOP_K=top_k,
        COPIES=copies,
        EXPERTS=experts,
        SLOTS=max(32, triton.next_power_of_2(slots)) if alone else 0,
        BF16=x.dtype is torch.bfloat16,
        SHARED=False,
        PACKED=packed,
        DECODED=decoded,
        ALIGN=groups.align if direct else 0,
        num_warps=own.warps,
        # Left alone, the compiler takes so few that loads wait for each other.
        maxnreg=64 if direct else None,
        enable_fp_fusion=False,
        launch_pdl=direct,
    )
    if not direct:
        finish_tiles(result, groups, token_scales, token_outer, token_bad, top_k)
    return result


@triton.jit
def _load_blocks(x, at, mask, ROWS: tl.constexpr, PADDED: tl.constexpr, BF16: tl.constexpr):
    """Blocks number `at` of x -> a tuple of their words, 8 of BF16 or 16 of FP32, each uint32 [ROWS, PADDED], and the
    bits (int32) of the largest magnitude.
    """
    if BF16:
        found = load_four(x + at * 8, mask, ROWS, PADDED) + load_four(x + at * 8 + 4, mask, ROWS, PADDED)
        return found, largest_of_block_bf16(*found)
    else:
        first = load_four(x + at * 16, mask, ROWS, PADDED)
        second = load_four(x + at * 16 + 4, mask, ROWS, PADDED)
        third = load_four(x + at * 16 + 8, mask, ROWS, PADDED)
        fourth = load_four(x + at * 16 + 12, mask, ROWS, PADDED)
        largest = tl.maximum(largest_of_four_f32(*first), largest_of_four_f32(*second))
        largest = tl.maximum(largest, largest_of_four_f32(*third))
        return first + second + third + fourth, tl.maximum(largest, largest_of_four_f32(*fourth))


@triton.jit
def _encode(blocks, scale, g, BF16: tl.constexpr):
    """What `_load_blocks` gave -> two uint32 of eight codes each."""
    if BF16:
        return codes_of_bf16(*blocks, scale, g)
    else:
        power, divisor, reciprocal = element_divisor(scale, g)
        c0 = encode_f32(*blocks[:8], power, divisor, reciprocal)
        c1 = encode_f32(*blocks[8:], power, divisor, reciprocal)
        return tl.where(scale == 0, 0, c0), tl.where(scale == 0, 0, c1)


@triton.jit
def _quantize(
    x,
    codes,
    decoded,
    scales,
    outer,
    bad,
    amax,
    ids,
    row_of_slot,
    tile_expert,
    bad_counts,
    rows,
    rows_of_group,
    BLOCKS: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    TOP_K: tl.constexpr,
    COPIES: tl.constexpr,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
    BF16: tl.constexpr,
    SHARED: tl.constexpr,
    PACKED: tl.constexpr,
    DECODED: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """x int32 words [rows, K/2 or K] -> codes int32 and decoded int32 (f16 pairs) at their destinations, scales and g
    of the rows. TOP_K = 0: a row's destination is its own number, else those in row_of_slot [rows, TOP_K], -1 for none,
    of which a program takes COPIES. ALIGN > 0: g and flags go to the destinations too, which stand in tiles of ALIGN
    rows, and flags are counted; the kernel before this one makes row_of_slot. SLOTS > 0, a power of two: the
    destinations are found from ids instead, which has no more than so many elements, and that kernel is only waited
    for at the end: what reads its results may start after this one.
    """
    if SLOTS > 0:
        tl.static_assert(ROWS == 1)
        first = tl.program_id(0) * TOP_K + tl.program_id(1) * COPIES
        expert_of_slot = load_ids(ids, tl.arange(0, SLOTS), rows * TOP_K, EXPERTS)
        experts = load_some_ids(ids, first, rows * TOP_K, COPIES, EXPERTS)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    block = tl.arange(0, PADDED)
    own = row < rows
    mask = own[:, None] & (block < BLOCKS)[None, :]
    at = row[:, None] * BLOCKS + block[None, :]
    blocks, block_bits = _load_blocks(x, at, mask, ROWS, PADDED, BF16)
    if SHARED:
        row_bits = tl.load(amax + row // rows_of_group, mask=own, other=0)
    else:
        row_bits = tl.max(block_bits, axis=1)
    if SLOTS > 0:
        BINS: tl.constexpr = triton.next_power_of_2(EXPERTS)
        targets = rows_of_slots(expert_of_slot, experts, first, BINS, ALIGN, SLOTS)
    row_g, finite = outer_scale(row_bits)
    flag = tl.where(finite, 0, 1).to(tl.uint8)
    g = tl.broadcast_to(row_g[:, None], (ROWS, PADDED))
    scale = block_scale(block_bits, g, tl.broadcast_to(finite[:, None], (ROWS, PADDED)))
    if ALIGN == 0:
        tl.store(bad + row, flag, mask=own)
        tl.store(outer + row // rows_of_group, row_g, mask=own & (row % rows_of_group == 0))
        tl.store(scales + at, scale.to(tl.uint8), mask=mask)

    c0, c1 = _encode(blocks, scale, g, BF16)
    pair = tl.arange(0, 2)
    code_words = tl.join(c0, c1).to(tl.int32, bitcast=True)
    word = tl.arange(0, PADDED * 8)
    if DECODED:
        f16_words = decoded_words(c0, c1, scale, ROWS, PADDED)
    if ALIGN > 0 and SLOTS == 0:
        wait_for_kernel_before()
    for copy in tl.static_range(COPIES):
        if TOP_K == 0:
            target = row
            there = own
        else:
            slot = tl.program_id(1) * COPIES + copy
            exists = own & (slot < TOP_K)
            if SLOTS > 0:
                target = tl.where(exists, targets[copy], -1).to(tl.int64)
            else:
                target = tl.load(row_of_slot + row * TOP_K + slot, mask=exists, other=-1).to(tl.int64)
            there = target >= 0
        if ALIGN > 0:
            tl.store(outer + target, row_g, mask=there)
            tl.store(bad + target, flag, mask=there)
            wrong = there & (flag > 0)
            if SLOTS > 0:
                expert = tl.zeros((ROWS,), tl.int32) + experts[copy]
            else:
                expert = tl.load(tile_expert + target // ALIGN, mask=wrong, other=0)
            count_bad(bad_counts, expert, wrong, ROWS)
        if PACKED:
            to = (target[:, None] * BLOCKS + block[None, :])[:, :, None] * 2 + pair[None, None, :]
            tl.store(codes + to, code_words, mask=(there[:, None] & (block < BLOCKS)[None, :])[:, :, None])
        if DECODED:
            to = target[:, None] * (BLOCKS * 8) + word[None, :]
            tl.store(decoded + to, f16_words, mask=there[:, None] & (word < BLOCKS * 8)[None, :])
    if SLOTS > 0:
        wait_for_kernel_before()
