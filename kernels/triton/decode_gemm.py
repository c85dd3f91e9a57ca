"""Products of few rows an expert with 4-bit weights read packed: bound by the bytes of the weights, not by arithmetic.

The same composition as `kernels.triton.grouped_gemm`, and the same order of sums along K. A program takes 128 output
features and one tile of an expert's rows; weights are the tall side of the product, so that 16 rows fill the tensor
core, and are read from their tiles (`kernels.triton.tiles`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.codec import (
    COMPILED,
    as_stored,
    end_behind_kernel_before,
    let_next_kernel_start,
    report_finished,
    to_bf16,
    wait_for_kernel_before,
    wait_until,
)
from kernels.triton.grouping import ExpertGroups
from kernels.triton.matrix import ExpertMatrix
from kernels.triton.operand import GroupedOperand, parts_for_4_bits
from kernels.triton.tiles import TILE, load_tile
from kernels.triton.tuning import FEW_ROWS


def decode_gemm(
    operand: GroupedOperand,
    weight: ExpertMatrix,
    groups: ExpertGroups,
    *,
    out: torch.Tensor,
    after: torch.Tensor | None = None,
    finished: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `kernels.triton.grouped_gemm.grouped_gemm`, bit for bit, but for few rows an expert; rows in padding are not
    written. A tile has as many rows as `groups` are aligned to: 16 or 32. The kernel before this one, which
    makes the operand, and this one overlap: `groups` must be complete before that one lets this one start.

    after: int32 [tiles], where that kernel counts the rows of each tile that it has finished: a tile then waits for its
    own rows rather than for the end of that kernel; what earlier kernels read must be held until the kernel after this
    one is launched, since they may still be at work. finished: int32 [tiles], to which each program that is done adds
    one, N / 128 for a tile in all. Raises ValueError for operands that do not fit or that are not decoded, for groups
    aligned otherwise, and for weights whose N or K is no multiple of 128.
    """
    _, features, width = weight.shape
    decoded, words, scales = parts_for_4_bits(operand, weight, groups, out, FEW_ROWS)
    if not groups.rows:
        return out
    tile = FEW_ROWS[groups.align]
    decode_product[(groups.tile_expert.numel() * (features // TILE),)](
        decoded,
        operand.outer_scales,
        words,
        scales,
        weight.outer,
        as_stored(out),
        groups.tile_expert,
        groups.starts,
        groups.counts,
        groups.starts if after is None else after,
        groups.starts if finished is None else finished,
        N=features,
        K=width,
        BM=tile.rows,
        AFTER=after is not None,
        REPORT=finished is not None,
        STAGES=tile.stages,
        num_warps=tile.warps,
        maxnreg=tile.registers,
        launch_pdl=True,
    )
    return out


@triton.jit
def decode_product(
    x_ptr,
    ga_ptr,
    words_ptr,
    scales_ptr,
    gb_ptr,
    out_ptr,
    tile_expert_ptr,
    starts_ptr,
    counts_ptr,
    after_ptr,
    finished_ptr,
    N: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    AFTER: tl.constexpr,
    REPORT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """x: float16 [R, K]; words, scales: `pack_tiles`; out: bfloat16 [R, N]. Rows in padding are left as they are."""
    ROW_TILES: tl.constexpr = N // 128
    K_TILES: tl.constexpr = K // 128
    row_tile = tl.program_id(0) // ROW_TILES
    # Groups are read ahead of the wait, so past this processor's own cache, from where all processors see them.
    e = tl.load(tile_expert_ptr + row_tile, cache_modifier=".cg")
    if e >= 0:
        feature_tile = tl.program_id(0) % ROW_TILES
        words_at = words_ptr + (e * ROW_TILES + feature_tile).to(tl.int64) * (K_TILES * 2048)
        scales_at = scales_ptr + (e * ROW_TILES + feature_tile).to(tl.int64) * (K_TILES * 1024)
        fetch_ahead(words_at, min(2, K_TILES))
        first = row_tile * BM
        end = tl.load(starts_ptr + e, cache_modifier=".cg") + tl.load(counts_ptr + e, cache_modifier=".cg")
        columns = feature_tile * 128 + tl.arange(0, 128)
        gb = tl.load(gb_ptr + e.to(tl.int64) * N + columns)
        inside = first + tl.arange(0, BM) < end
        rows = (first + tl.arange(0, BM)).to(tl.int64)
        x_at = x_ptr + first.to(tl.int64) * K + tl.arange(0, BM)[:, None] * K + tl.arange(0, 128)[None, :]
        if AFTER:
            let_next_kernel_start()
            wait_until(after_ptr + row_tile, tl.minimum(end - first, BM))
        else:
            wait_for_kernel_before()
        ga = tl.load(ga_ptr + rows, mask=inside, other=0.0)
        acc = tl.zeros((128, BM), tl.float32)
        for k in tl.range(0, K_TILES, num_stages=STAGES):
            x = tl.load(x_at + k * 128, mask=inside[:, None], other=0.0)
            acc = tl.dot(load_tile(words_at, scales_at, k, True), x.T, acc)
        value = to_bf16(acc * (ga[None, :] * gb[:, None]))
        tl.store(out_ptr + rows[None, :] * N + columns[:, None], value, mask=inside[None, :])
        if REPORT:
            report_finished(finished_ptr + row_tile)
    elif not AFTER:
        wait_for_kernel_before()
    else:
        let_next_kernel_start()
    if AFTER:
        end_behind_kernel_before()


@triton.jit
def fetch_ahead(words_at, TILES: tl.constexpr):
    """Asks for the first tiles of words, which do not depend on the kernel before, in lines of 128 bytes."""
    if COMPILED:
        line = (words_at + tl.arange(0, TILES * 64) * 32).to(tl.int64)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [line], tl.int32, False, 1
        )
