"""SwiGLU and quantisation fused, or SwiGLU alone: what stands between FC1 and FC2.

The reference takes silu in FP64 and rounds it to FP32, multiplies by `up` in FP32 and rounds to BF16. Here silu is
taken in FP32, with a relative error below 2^-17; where that could change the BF16 result, because the product is that
near to a midpoint of two BF16 numbers, the exact silu is looked up. A gate is a BF16 number, so that a table of 65,536
entries holds it for every gate; some elements in a thousand need it.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from kernels.quantizer_spec import QuantizerSpec, ScaleDomain
from kernels.triton.block import (
    block_scale,
    codes_of_bf16,
    decoded_words,
    join_words,
    largest_of_block_bf16,
    load_four,
    outer_scale,
)
from kernels.triton.codec import (
    COMPILED,
    approximate_reciprocal,
    bf16_high,
    bf16_low,
    end_behind_kernel_before,
    let_next_kernel_start,
    pack_bf16,
    report_finished,
    wait_for_kernel_before,
    wait_until,
)
from kernels.triton.grouping import ExpertGroups
from kernels.triton.operand import BLOCK, GroupedOperand, count_bad, empty_operand, finish_tiles
from kernels.triton.quantize import tile, tile_of_few
from kernels.triton.support import check_bad_counts, check_quantizer, words
from kernels.triton.tiles import TILE

_MINUS_LOG2_E = tl.constexpr(-1.4426950408889634)
_LESS = tl.constexpr(1 - 2**-17)  # more than the relative error of silu where that is above 2^-119
_MORE = tl.constexpr(1 + 2**-17)
_TINY = tl.constexpr(2.0**-100)  # smaller products are looked up; in the assembly below as two BF16 numbers
# Of a thread where there are few rows: left alone, the compiler takes so few that loads wait for each other.
_REGISTERS_OF_FEW = 64

# $0: a word of products; $1, $2: what they are between, rounded; $3, $4: words of gates and ups; $5: the table.
_LOOK_UP = tl.constexpr("""{
    .reg .pred unsure, tiny;
    .reg .b32 low, high, up_low, up_high;
    .reg .b64 at_low, at_high;
    mov.b32 $0, $1;
    and.b32 low, $1, 0x7FFF7FFF;
    mov.b32 high, 0x0D800D80;
    setp.lt.bf16x2 unsure|tiny, low, high;
    or.pred unsure, unsure, tiny;
    setp.ne.or.b32 unsure, $1, $2, unsure;
    @!unsure bra done;
    and.b32 low, $3, 0xFFFF;
    shr.u32 high, $3, 16;
    mad.wide.u32 at_low, low, 4, $5;
    mad.wide.u32 at_high, high, 4, $5;
    ld.global.b32 low, [at_low];
    ld.global.b32 high, [at_high];
    shl.b32 up_low, $4, 16;
    and.b32 up_high, $4, 0xFFFF0000;
    mul.rn.f32 low, low, up_low;
    mul.rn.f32 high, high, up_high;
    cvt.rn.bf16x2.f32 $0, high, low;
done:
}""")


def swiglu_quantize(
    fc1: torch.Tensor,
    groups: ExpertGroups,
    spec: QuantizerSpec,
    *,
    packed: bool,
    decoded: bool,
    keep_act: bool,
    bad_counts: torch.Tensor | None = None,
    after: torch.Tensor | None = None,
    finished: torch.Tensor | None = None,
) -> tuple[GroupedOperand, torch.Tensor | None]:
    """FC1's output bfloat16 [R, 2F] in grouped order, gate then up -> FC2's quantised input, and the same before
    quantisation, bfloat16 [R, F] with padding rows of zeros, if `keep_act`.

    Rows of padding are not read; rows from starts[E] on are neither read nor written. bad_counts: int64 [E], to which
    the number of each expert's rows that are not finite is added; padding is then not written either, `groups` must be
    complete before the kernel before this one, which makes fc1, lets this one start, and the kernel after may start
    before that one has ended. after, finished, with bad_counts only: int32 [R / align], where programs of FC1 count for
    each tile of rows what they have finished, so that a row waits for its own tile alone, and where rows that are
    finished here are counted. The first call on a device makes a table there, and cannot be part of a CUDA graph.
    Raises ValueError for specs other than `minite`'s, for another shape or type, when no form is asked for, for
    bad_counts beside packed codes or `keep_act`, and for after or finished without bad_counts.
    """
    check_quantizer(spec, (ScaleDomain.TOKEN,))
    _check(fc1, groups)
    check_bad_counts(bad_counts, groups.counts.shape[0], fc1.device)
    if bad_counts is not None and (packed or keep_act):
        raise ValueError(
            "with bad_counts padding is not written: neither packed codes nor act can be asked for"
        )
    if bad_counts is None and (after is not None or finished is not None):
        raise ValueError("after and finished are for few rows: they take bad_counts")
    rows, width = fc1.shape[0], fc1.shape[1] // 2
    blocks, device = width // BLOCK, fc1.device
    result = empty_operand(groups, width, packed=packed, decoded=decoded)
    act = torch.empty(rows, width, dtype=torch.bfloat16, device=device) if keep_act else None
    if not rows:
        return result, act
    scales = torch.empty(rows if packed else 1, blocks, dtype=torch.uint8, device=device)
    _launch(fc1, groups, act, result, scales, bad_counts, after, finished)
    if packed:
        finish_tiles(result, groups, scales, result.outer_scales, result.bad.view(torch.uint8), top_k=0)
    return result, act


def swiglu(fc1: torch.Tensor, groups: ExpertGroups) -> torch.Tensor:
    """FC1's output bfloat16 [R, 2F] in grouped order, gate then up -> bfloat16 [R, F], padding rows of zeros: the very
    values that `swiglu_quantize` quantises. Otherwise as there. Values that are not finite are carried through.
    """
    _check(fc1, groups)
    act = torch.empty(len(fc1), fc1.shape[1] // 2, dtype=torch.bfloat16, device=fc1.device)
    if len(fc1):
        _launch(fc1, groups, act)
    return act


def _check(fc1: torch.Tensor, groups: ExpertGroups) -> None:
    if fc1.dim() != 2 or fc1.dtype is not torch.bfloat16 or fc1.shape[1] == 0 or fc1.shape[1] % (2 * BLOCK):
        raise ValueError(
            f"fc1 must be bfloat16 [R, 2F], F a multiple of {BLOCK}, got {fc1.dtype} {tuple(fc1.shape)}"
        )
    if len(fc1) != groups.rows:
        raise ValueError(f"groups have {groups.rows} rows, fc1 is {tuple(fc1.shape)}")


def _launch(
    fc1: torch.Tensor,
    groups: ExpertGroups,
    act: torch.Tensor | None,
    result: GroupedOperand | None = None,
    scales: torch.Tensor | None = None,
    bad_counts: torch.Tensor | None = None,
    after: torch.Tensor | None = None,
    finished: torch.Tensor | None = None,
) -> None:
    """result: where what is quantised goes, with the block scales in their logical order beside it."""
    blocks = fc1.shape[1] // (2 * BLOCK)
    few = bad_counts is not None
    own = tile_of_few(blocks) if few else tile(blocks)
    # Of few rows most are padding: slots are gone through instead.
    permutation = groups.row_of_slot if few else groups.slot_of_row
    unused = groups.starts
    packed, decoded = (None, None) if result is None else (result.codes, result.decoded)
    _swiglu_quantize[(triton.cdiv(permutation.numel(), own.rows),)](
        words(fc1),
        silu_table(fc1.device),
        unused if packed is None else packed.view(torch.int32),
        unused if decoded is None else decoded.view(torch.int32),
        unused if act is None else act.view(torch.int32),
        unused if scales is None else scales,
        unused if result is None else result.outer_scales,
        unused if result is None else result.bad.view(torch.uint8),
        permutation,
        groups.starts,
        groups.tile_expert,
        bad_counts if few else unused,
        unused if after is None else after,
        unused if finished is None else finished,
        permutation.numel(),
        EXPERTS=groups.counts.shape[0],
        BLOCKS=blocks,
        PADDED=triton.next_power_of_2(blocks),
        ROWS=own.rows,
        ALIGN=groups.align if few else 0,
        AFTER=0 if after is None else fc1.shape[1] // TILE,
        REPORT=finished is not None,
        QUANTIZE=result is not None,
        PACKED=packed is not None,
        DECODED=decoded is not None,
        KEEP_ACT=act is not None,
        num_warps=own.warps,
        maxnreg=_REGISTERS_OF_FEW if few else None,
        enable_fp_fusion=False,
        launch_pdl=few,
    )


@lru_cache(maxsize=64)
def silu_table(device: torch.device) -> torch.Tensor:
    """float32 [65536]: silu of the BF16 number with these bits, as the reference has it."""
    gates = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return torch.nn.functional.silu(gates.double()).float().to(device)


@triton.jit
def _swiglu_word(gate, up, table):
    """Words of gates and ups -> a word of silu(gate) * up."""
    low = _silu(bf16_low(gate)) * bf16_low(up)
    high = _silu(bf16_high(gate)) * bf16_high(up)
    # Rounding is monotone: where both ends of the interval round alike, so does all between. Tiny products, among
    # them those whose gate is below -87 and whose silu vanishes here, have no small relative error.
    less = pack_bf16(low * _LESS, high * _LESS)
    more = pack_bf16(low * _MORE, high * _MORE)
    if COMPILED:
        return tl.inline_asm_elementwise(
            _LOOK_UP, "=&r,r,r,r,r,l", [less, more, gate, up, table.to(tl.int64)], tl.uint32, True, 1
        )
    unsure = (less != more) | (tl.minimum(tl.abs(low), tl.abs(high)) < _TINY)
    low = tl.load(table + (gate & 0xFFFF).to(tl.int32), mask=unsure, other=0.0) * bf16_low(up)
    high = tl.load(table + (gate >> 16).to(tl.int32), mask=unsure, other=0.0) * bf16_high(up)
    return tl.where(unsure, pack_bf16(low, high), less)


@triton.jit
def _silu(gate):
    """float32, within a relative 2^-17.5 for gates above -87; -0 for those below."""
    return gate * approximate_reciprocal(tl.exp2(gate * _MINUS_LOG2_E) + 1.0)


@triton.jit
def _swiglu_quantize(
    fc1,
    table,
    codes,
    decoded,
    act,
    scales,
    outer,
    bad,
    permutation,
    starts,
    tile_expert,
    bad_counts,
    after,
    finished,
    count,
    EXPERTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGN: tl.constexpr,
    AFTER: tl.constexpr,
    REPORT: tl.constexpr,
    QUANTIZE: tl.constexpr,
    PACKED: tl.constexpr,
    DECODED: tl.constexpr,
    KEEP_ACT: tl.constexpr,
):
    """fc1 int32 words [rows, 2 * 8 BLOCKS]; codes, decoded and act int32 words; scales [rows, BLOCKS].
    permutation: slot_of_row, `count` rows. ALIGN > 0: row_of_slot, `count` slots; padding is then left alone, and rows
    that are not finite are counted for the experts of tiles of ALIGN rows. AFTER > 0: a row waits until so many
    programs have finished its tile.
    """
    first = tl.program_id(0) * ROWS
    row = (first + tl.arange(0, ROWS)).to(tl.int64)
    inside = row < count
    # Ahead of the wait, so past this processor's own cache.
    other = tl.load(permutation + row, mask=inside, other=-1, cache_modifier=".cg")
    routed = other >= 0
    if ALIGN > 0:
        row = other.to(tl.int64)
        let_next_kernel_start()
        # Not ahead of the groups, which are older.
        if AFTER > 0:
            tl.static_assert(ROWS == 1)
            own = tl.max(row, axis=0)
            if own >= 0:
                wait_until(after + own // ALIGN, AFTER)
        else:
            wait_for_kernel_before()
        inside = routed
        some = tl.max(routed.to(tl.int32), axis=0) > 0
    else:
        some = first < tl.load(starts + EXPERTS)
    if some:
        block = tl.arange(0, PADDED)
        exists = (block < BLOCKS)[None, :]
        at = row[:, None] * BLOCKS + block[None, :]
        gate = fc1 + row[:, None] * (BLOCKS * 16) + block[None, :] * 8
        mask = routed[:, None] & exists
        g0, g1, g2, g3 = load_four(gate, mask, ROWS, PADDED)
        g4, g5, g6, g7 = load_four(gate + 4, mask, ROWS, PADDED)
        u0, u1, u2, u3 = load_four(gate + BLOCKS * 8, mask, ROWS, PADDED)
        u4, u5, u6, u7 = load_four(gate + (BLOCKS * 8 + 4), mask, ROWS, PADDED)
        w0 = _swiglu_word(g0, u0, table)
        w1 = _swiglu_word(g1, u1, table)
        w2 = _swiglu_word(g2, u2, table)
        w3 = _swiglu_word(g3, u3, table)
        w4 = _swiglu_word(g4, u4, table)
        w5 = _swiglu_word(g5, u5, table)
        w6 = _swiglu_word(g6, u6, table)
        w7 = _swiglu_word(g7, u7, table)
        word = tl.arange(0, PADDED * 8)
        words_to = row[:, None] * (BLOCKS * 8) + word[None, :]
        words_mask = inside[:, None] & (word < BLOCKS * 8)[None, :]
        if KEEP_ACT:
            tl.store(
                act + words_to, join_words(w0, w1, w2, w3, w4, w5, w6, w7, ROWS, PADDED), mask=words_mask
            )
        if QUANTIZE:
            block_bits = largest_of_block_bf16(w0, w1, w2, w3, w4, w5, w6, w7)
            row_g, finite = outer_scale(tl.max(block_bits, axis=1))
            tl.store(outer + row, tl.where(routed, row_g, 0.0), mask=inside)
            tl.store(bad + row, tl.where(finite, 0, 1).to(tl.uint8), mask=inside)
            if ALIGN > 0:
                wrong = routed & ~finite
                expert = tl.load(tile_expert + row // ALIGN, mask=wrong, other=0)
                count_bad(bad_counts, expert, wrong, ROWS)
            row_g = tl.broadcast_to(row_g[:, None], (ROWS, PADDED))
            scale = block_scale(block_bits, row_g, tl.broadcast_to(finite[:, None], (ROWS, PADDED)))
            c0, c1 = codes_of_bf16(w0, w1, w2, w3, w4, w5, w6, w7, scale, row_g)
            store = inside[:, None] & exists
            if PACKED:
                tl.store(scales + at, scale.to(tl.uint8), mask=store)
                pair = tl.arange(0, 2)
                to = at[:, :, None] * 2 + pair[None, None, :]
                tl.store(codes + to, tl.join(c0, c1).to(tl.int32, bitcast=True), mask=store[:, :, None])
            if DECODED:
                tl.store(decoded + words_to, decoded_words(c0, c1, scale, ROWS, PADDED), mask=words_mask)
        if REPORT:
            report_finished(finished + row // ALIGN, mask=routed)
    if AFTER > 0:
        end_behind_kernel_before()
