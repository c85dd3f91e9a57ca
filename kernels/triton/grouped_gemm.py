"""Grouped products: each expert's rows times the transpose of its weight, outer scales in the epilogue.

    out[m, n] = bf16(fl(acc * fl(ga[m] * gb[e, n]))),  acc = sum over k of a[m, k] * w[e, n, k]

One persistent kernel in two forms. Emulated: operands are code times block scale, decoded to float16 once (exact: at
most 6 significant bits), multiplied on 16-bit tensor cores. Native: packed codes and swizzled block scales go to
the block-scaled FP4 tensor cores of Blackwell as they are stored. Sums run in FP32 in the tensor core's order, which
for one output element depends on K alone: not on the tile, the row's place, or the rows beside it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def to_bf16(x, BY_INTEGER: tl.constexpr):
    """float32 -> bfloat16, nearest-even; BY_INTEGER as its int16 bits, for the interpreter, whose cast truncates."""
    if BY_INTEGER:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded)
        return rounded.to(tl.int16)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def unswizzled(scales, ROWS: tl.constexpr, BK: tl.constexpr):
    """A [1, ROWS/128, BK/64, 2, 256] tile of swizzled block scales -> [ROWS, BK/16]."""
    tiles = scales.reshape(ROWS // 128, BK // 64, 32, 4, 4)
    return tiles.trans(0, 3, 2, 1, 4).reshape(ROWS, BK // 16)


@triton.jit
def grouped_product(
    a_desc,
    a_scales_desc,
    w_desc,
    w_scales_desc,
    ga_ptr,
    gb_ptr,
    out_desc,
    tile_expert_ptr,
    starts_ptr,
    E,
    N: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PROGRAMS: tl.constexpr,
    STAGES: tl.constexpr,
    PARTS: tl.constexpr,
    FLATTEN: tl.constexpr,
    SPECIALIZE: tl.constexpr,
    NATIVE: tl.constexpr,
    BY_INTEGER: tl.constexpr,
):
    """Program p takes the output tiles p, p + PROGRAMS, ...; neighbours share rows, so that these stay in the L2."""
    COLUMN_TILES: tl.constexpr = (N + BN - 1) // BN
    total = tl.load(starts_ptr + E) // BM * COLUMN_TILES
    for tile in tl.range(
        tl.program_id(0), total, PROGRAMS, flatten=FLATTEN, warp_specialize=SPECIALIZE
    ):
        row_tile = tile // COLUMN_TILES
        m0 = row_tile * BM
        n0 = tile % COLUMN_TILES * BN
        e = tl.load(tile_expert_ptr + row_tile)
        w0 = e * N + n0
        acc = tl.zeros((BM, BN), tl.float32)
        for k in tl.range(0, K, BK, num_stages=STAGES):
            if NATIVE:
                a = a_desc.load([m0, k // 2])
                w = w_desc.load([w0, k // 2])
                a_scales = unswizzled(a_scales_desc.load([0, m0 // 128, k // 64, 0, 0]), BM, BK)
                w_scales = unswizzled(w_scales_desc.load([0, w0 // 128, k // 64, 0, 0]), BN, BK)
                acc = tl.dot_scaled(a, a_scales, "e2m1", w.T, w_scales, "e2m1", acc)
            else:
                acc = tl.dot(a_desc.load([m0, k]), w_desc.load([w0, k]).T, acc)
        rows = m0 + tl.arange(0, BM)
        ga = tl.load(ga_ptr + rows)
        if PARTS == 0:
            columns = n0 + tl.arange(0, BN)
            gb = tl.load(gb_ptr + e.to(tl.int64) * N + columns, mask=columns < N, other=0.0)
            value = to_bf16(acc * (ga[:, None] * gb[None, :]), BY_INTEGER)
            tl.store(out_desc + rows.to(tl.int64)[:, None] * N + columns[None, :], value, mask=(columns < N)[None, :])
        elif PARTS == 1:
            columns = n0 + tl.arange(0, BN)
            gb = tl.load(gb_ptr + e.to(tl.int64) * N + columns, mask=columns < N, other=0.0)
            out_desc.store([m0, n0], to_bf16(acc * (ga[:, None] * gb[None, :]), BY_INTEGER))
        else:
            # Halves, so that less shared memory waits for the store.
            left, right = tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))
            columns = n0 + tl.arange(0, BN // 2)
            gb = tl.load(gb_ptr + e.to(tl.int64) * N + columns, mask=columns < N, other=0.0)
            out_desc.store([m0, n0], to_bf16(left * (ga[:, None] * gb[None, :]), BY_INTEGER))
            columns += BN // 2
            gb = tl.load(gb_ptr + e.to(tl.int64) * N + columns, mask=columns < N, other=0.0)
            out_desc.store([m0, n0 + BN // 2], to_bf16(right * (ga[:, None] * gb[None, :]), BY_INTEGER))
