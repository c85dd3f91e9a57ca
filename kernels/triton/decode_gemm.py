"""Products of few rows an expert with 4-bit weights read packed: bound by the bytes of the weights, not by arithmetic.

The same composition as `kernels.triton.grouped_gemm`, and the same order of sums along K. A program takes 128 output
features of one expert and all of the expert's rows; weights are the tall side of the product, so that 16 rows fill
the tensor core, and are read from their tiles (`kernels.triton.tiles`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.codec import wait_for_kernel_before
from kernels.triton.grouped_gemm import as_stored, check_operand, to_bf16
from kernels.triton.grouping import ExpertGroups
from kernels.triton.matrix import ExpertMatrix
from kernels.triton.operand import GroupedOperand
from kernels.triton.tiles import TILE, load_tile
from kernels.triton.tuning import DecodeTile, decode_tile


def decode_gemm(
    operand: GroupedOperand,
    weight: ExpertMatrix,
    groups: ExpertGroups,
    *,
    out: torch.Tensor,
    tile: DecodeTile | None = None,
) -> torch.Tensor:
    """As `kernels.triton.grouped_gemm.grouped_gemm`, bit for bit, but for few rows an expert; rows in padding are not
    written. `groups` may be aligned to any number of rows. Raises ValueError for operands that do not fit or that are
    not decoded, and for weights whose N or K is no multiple of 128.
    """
    experts, features, width = weight.shape
    if weight.words is None or weight.word_scales is None or operand.decoded is None:
        raise ValueError(
            f"products of few rows need a decoded operand and weights of multiples of {TILE}, got {weight.shape}"
        )
    check_operand(operand.decoded, operand.outer_scales, weight, groups, out)
    if not groups.rows:
        return out
    slots = groups.row_of_slot.numel()
    tile = tile or decode_tile(slots, experts)
    decode_product[(experts * features // TILE,)](
        operand.decoded,
        operand.outer_scales,
        weight.words,
        weight.word_scales.view(torch.float8_e4m3fn),
        weight.outer,
        as_stored(out),
        groups.starts,
        groups.counts,
        N=features,
        K=width,
        BM=tile.rows,
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
    starts_ptr,
    counts_ptr,
    N: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    STAGES: tl.constexpr,
):
    """x: float16 [R, K]; words, scales: `pack_tiles`; out: bfloat16 [R, N]. Rows in padding are left as they are."""
    ROW_TILES: tl.constexpr = N // 128
    K_TILES: tl.constexpr = K // 128
    e = tl.program_id(0) // ROW_TILES
    wait_for_kernel_before()
    count = tl.load(counts_ptr + e)
    if count > 0:
        first = tl.load(starts_ptr + e)
        tile = tl.program_id(0).to(tl.int64) * K_TILES
        columns = tl.program_id(0) % ROW_TILES * 128 + tl.arange(0, 128)
        gb = tl.load(gb_ptr + e.to(tl.int64) * N + columns)
        for m in range(0, count, BM):
            inside = m + tl.arange(0, BM) < count
            rows = (first + m + tl.arange(0, BM)).to(tl.int64)
            # Without a mask: what stands behind the last row is not stored, and must only be there.
            x_at = x_ptr + tl.where(inside, rows, first)[:, None] * K + tl.arange(0, 128)[None, :]
            acc = tl.zeros((128, BM), tl.float32)
            for k in tl.range(0, K_TILES, num_stages=STAGES):
                x = tl.load(x_at + k * 128)
                acc = tl.dot(load_tile(words_ptr, scales_ptr, tile + k), x.T, acc)
            ga = tl.load(ga_ptr + rows, mask=inside, other=0.0)
            value = to_bf16(acc * (ga[None, :] * gb[:, None]))
            tl.store(out_ptr + rows[None, :] * N + columns[:, None], value, mask=inside[None, :])
