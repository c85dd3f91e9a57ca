"""Products of many rows an expert with 4-bit weights read packed, so that no weights of 16 bits are held or written.

The same composition as `kernels.triton.grouped_gemm`, and the same order of sums along K. As there, programs stay and
take one tile of the output after the other; as in `kernels.triton.decode_gemm`, weights are the tall side of the
product, and are decoded into the registers that it reads. Two or more programs share a processor: while one decodes or
writes its output, another multiplies.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.triton.codec import as_stored, to_bf16
from kernels.triton.grouping import ExpertGroups
from kernels.triton.matrix import ExpertMatrix
from kernels.triton.operand import GroupedOperand, parts_for_4_bits
from kernels.triton.support import processors
from kernels.triton.tiles import TILE, load_half_tile
from kernels.triton.tuning import PACKED

_DEPTH = 64  # elements along K at a time
_STORED = 64  # rows of the output at a time


def packed_gemm(
    operand: GroupedOperand, weight: ExpertMatrix, groups: ExpertGroups, *, out: torch.Tensor
) -> torch.Tensor:
    """As `kernels.triton.grouped_gemm.grouped_gemm`, bit for bit: padding rows up to groups.starts[E] become zero,
    later rows are left as they are. A tile has as many rows as `groups` are aligned to: 64 or 128.

    Raises ValueError for operands that do not fit or that are not decoded, for groups aligned otherwise, and for
    weights whose N or K is no multiple of 128.
    """
    experts, features, width = weight.shape
    decoded, words, scales = parts_for_4_bits(operand, weight, groups, out, PACKED)
    if not groups.rows:
        return out
    tile = PACKED[groups.align]
    programs = processors(out.device) * tile.programs_per_processor
    packed_product[(programs,)](
        TensorDescriptor.from_tensor(decoded, [tile.rows, _DEPTH]),
        words,
        scales,
        operand.outer_scales,
        weight.outer,
        TensorDescriptor.from_tensor(as_stored(out), [_STORED, TILE]),
        groups.tile_expert,
        groups.starts,
        experts,
        N=features,
        K=width,
        BM=tile.rows,
        PROGRAMS=programs,
        STAGES=tile.stages,
        num_warps=tile.warps,
        num_stages=tile.stages,
        maxnreg=tile.registers,
    )
    return out


@triton.jit
def packed_product(
    x_desc,
    words_ptr,
    scales_ptr,
    ga_ptr,
    gb_ptr,
    out_desc,
    tile_expert_ptr,
    starts_ptr,
    E,
    N: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    PROGRAMS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """x: float16 [R, K]; words, scales: `pack_tiles`; out: bfloat16 [R, N]. Program p takes the output tiles p,
    p + PROGRAMS, ...; neighbours share rows, so that these stay in the L2.
    """
    ROW_TILES: tl.constexpr = N // 128
    total = tl.load(starts_ptr + E) // BM * ROW_TILES
    # Not flattened with the loop over K: sums would be read in it, and each product would wait for the one before.
    for tile in tl.range(tl.program_id(0), total, PROGRAMS):
        m0 = tile // ROW_TILES * BM
        feature_tile = tile % ROW_TILES
        e = tl.load(tile_expert_ptr + m0 // BM)
        first = (e * ROW_TILES + feature_tile).to(tl.int64) * (K // 128)
        words_at, scales_at = words_ptr + first * 2048, scales_ptr + first * 1024
        acc = tl.zeros((128, BM), tl.float32)
        for k in tl.range(0, K // 64, num_stages=STAGES):
            x = x_desc.load([m0, k * 64])
            acc = tl.dot(load_half_tile(words_at, scales_at, k), x.T, acc)
        columns = feature_tile * 128 + tl.arange(0, 128)
        gb = tl.load(gb_ptr + e.to(tl.int64) * N + columns)
        if BM == 64:
            _store(out_desc, acc, ga_ptr, gb, m0, feature_tile)
        else:
            # Halves, so that less shared memory waits for the store.
            left, right = tl.split(tl.permute(tl.reshape(acc, (128, 2, 64)), (0, 2, 1)))
            _store(out_desc, left, ga_ptr, gb, m0, feature_tile)
            _store(out_desc, right, ga_ptr, gb, m0 + 64, feature_tile)


@triton.jit
def _store(out_desc, acc, ga_ptr, gb, row, feature_tile):
    """acc float32 [128, 64] times its outer scales, to rows from `row` on."""
    ga = tl.load(ga_ptr + row + tl.arange(0, 64))
    out_desc.store([row, feature_tile * 128], to_bf16(acc * (ga[None, :] * gb[:, None])).T)
