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

from kernels.swizzle import swizzled_size
from kernels.triton.codec import COMPILED, as_stored, to_bf16
from kernels.triton.grouping import ExpertGroups
from kernels.triton.matrix import ExpertMatrix
from kernels.triton.operand import GroupedOperand, check_operand
from kernels.triton.packed_gemm import packed_gemm
from kernels.triton.support import processors
from kernels.triton.tuning import GroupedTile, grouped_tile, reads_packed


def grouped_gemm(
    operand: GroupedOperand,
    weight: ExpertMatrix,
    groups: ExpertGroups,
    *,
    out: torch.Tensor,
    tile: GroupedTile | None = None,
) -> torch.Tensor:
    """The grouped rows of `operand` [R, K] times their experts' `weight` [E, N, K], into `out`, bfloat16 [R, N].

    Padding rows up to groups.starts[E] become zero, later rows are left as they are. Native where `weight` is, which
    needs a packed operand, else a decoded one; a compact weight is read as it is, by `packed_gemm`, or decoded first
    where rows are many. tile: for the other ones, instead of `kernels.triton.tuning`'s choice. Does not wait for the
    device. Raises ValueError for operands that do not fit.
    """
    native = weight.native
    experts, features, width = weight.shape
    if weight.compact and reads_packed(groups.row_of_slot.numel(), experts, compact=True):
        return packed_gemm(operand, weight, groups, out=out)
    elements = operand.codes if native else operand.decoded
    if elements is None:
        raise ValueError(f"the {'native' if native else 'emulated'} product needs the operand's other form")
    check_operand(elements, operand.outer_scales, weight, groups, out, 2 if native else 1)
    tile = tile or grouped_tile(out.device, groups.rows, features, width, native=native)
    if groups.align % tile.rows:
        raise ValueError(f"tiles of {tile.rows} rows need groups aligned to that, got {groups.align}")
    if not groups.rows:
        return out
    depth = tile.depth // 2 if native else tile.depth  # entries of a row of operands
    a, w = (operand.codes, weight.codes) if native else (operand.decoded, weight.elements())
    a_scales = w_scales = None
    if native:
        assert operand.block_scales is not None and weight.block_scales is not None
        a_scales = _scale_tiles(operand.block_scales, tile.rows, tile.depth, width)
        w_scales = _scale_tiles(weight.block_scales, tile.columns, tile.depth, width)
    assert a is not None and w is not None
    programs = processors(out.device) * tile.programs_per_processor
    grouped_product[(programs,)](
        TensorDescriptor.from_tensor(a, [tile.rows, depth]),
        a_scales,
        TensorDescriptor.from_tensor(w.flatten(0, 1), [tile.columns, depth]),
        w_scales,
        operand.outer_scales,
        weight.outer,
        TensorDescriptor.from_tensor(as_stored(out), [tile.rows, tile.columns // tile.parts]),
        groups.tile_expert,
        groups.starts,
        experts,
        N=features,
        K=width,
        BM=tile.rows,
        BN=tile.columns,
        BK=tile.depth,
        TILE_ROWS=groups.align,
        PROGRAMS=programs,
        STAGES=tile.stages,
        PARTS=tile.parts,
        NATIVE=native,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


def _scale_tiles(scales: torch.Tensor, rows: int, depth: int, width: int) -> TensorDescriptor:
    """Swizzled block scales of rows of `width` elements as [1, tiles of 128 rows, tiles of 64 elements, 2, 256]."""
    columns = -(-width // 64)
    tiles = scales.numel() // (swizzled_size(128, 4) * columns)
    view = scales.view(torch.float8_e4m3fn).view(1, tiles, columns, 2, 256)
    return TensorDescriptor.from_tensor(view, [1, rows // 128, depth // 64, 2, 256])


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
    TILE_ROWS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    STAGES: tl.constexpr,
    PARTS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Program p takes the output tiles p, p + PROGRAMS, ...; neighbours share rows, so that these stay in the L2."""
    COLUMN_TILES: tl.constexpr = (N + BN - 1) // BN
    total = tl.load(starts_ptr + E) // BM * COLUMN_TILES
    # Flattened with the loop over K, so that the next tile's operands arrive while this one's output leaves.
    for tile in tl.range(tl.program_id(0), total, PROGRAMS, flatten=COMPILED):
        row_tile = tile // COLUMN_TILES
        m0 = row_tile * BM
        n0 = tile % COLUMN_TILES * BN
        e = tl.load(tile_expert_ptr + m0 // TILE_ROWS)
        w0 = e * N + n0
        acc = tl.zeros((BM, BN), tl.float32)
        for k in tl.range(0, K, BK, num_stages=STAGES):
            if NATIVE:
                a = a_desc.load([m0, k // 2])
                w = w_desc.load([w0, k // 2])
                a_scales = unswizzled(a_scales_desc.load([0, m0 // 128, k // 64, 0, 0]), BM, BK)
                w_scales = unswizzled(
                    w_scales_desc.load([0, e * ((N + 127) // 128) + n0 // 128, k // 64, 0, 0]), BN, BK
                )
                acc = tl.dot_scaled(a, a_scales, "e2m1", w.T, w_scales, "e2m1", acc)
            else:
                acc = tl.dot(a_desc.load([m0, k]), w_desc.load([w0, k]).T, acc)
        rows = m0 + tl.arange(0, BM)
        ga = tl.load(ga_ptr + rows)
        if PARTS == 1:
            columns = n0 + tl.arange(0, BN)
            gb = tl.load(gb_ptr + e.to(tl.int64) * N + columns, mask=columns < N, other=0.0)
            out_desc.store([m0, n0], to_bf16(acc * (ga[:, None] * gb[None, :])))
        else:
            # Halves, so that less shared memory waits for the store.
            left, right = tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))
            columns = n0 + tl.arange(0, BN // 2)
            gb = tl.load(gb_ptr + e.to(tl.int64) * N + columns, mask=columns < N, other=0.0)
            out_desc.store([m0, n0], to_bf16(left * (ga[:, None] * gb[None, :])))
            columns += BN // 2
            gb = tl.load(gb_ptr + e.to(tl.int64) * N + columns, mask=columns < N, other=0.0)
            out_desc.store([m0, n0 + BN // 2], to_bf16(right * (ga[:, None] * gb[None, :])))
