"""Causal attention over packed sequences with grouped queries.

The softmax is taken block by block (Dao 2023, arXiv 2307.08691), in FP32 with powers of two. Every sum has a fixed
order, which depends on the sequence alone: the same bits at every call, and wherever the sequence stands among others
(as long as those are finite: a block that reaches into the next sequence multiplies its rows by zero).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.triton.codec import as_stored, to_bf16
from kernels.triton.outside.attention_blocks import Blocks, Tile, tiling

LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)
WIDTHS = (16, 32, 64, 128, 256)  # of a head
TYPES = (torch.bfloat16, torch.float16)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds: torch.Tensor,
    longest: int,
    scale: float,
    *,
    blocks: Blocks | None = None,
    tile: Tile | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [T, heads, D]; k, v [T, groups, D], all bfloat16 or all float16; bounds int32 [B + 1]: sequence b is tokens
    bounds[b] to bounds[b + 1], together all T, none longer than `longest` -> softmax(scale * q k^T) v over the keys up
    to each query, [T, heads, D], and the logarithm of its denominator, float32 [heads, T].

    heads is a multiple of groups, D a power of two from 16 to 256. Tokens may be apart; anything else is copied.
    blocks: those of the same bounds, to share between layers. tile: instead of `tiling`'s. Does not wait for the
    device. Raises ValueError for operands that do not fit.
    """
    blocks = checked(q, k, v, bounds, longest, scale, blocks)
    tile = checked_tile(tile or tiling(q.shape[2]).forward, of_queries=True)
    tokens, heads, width = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(heads, tokens, dtype=torch.float32, device=q.device)
    if tokens:
        table = blocks.of_queries(tile.queries)
        _forward[(len(table) * heads,)](
            rows_of(q, tile.queries),
            rows_of(k, tile.keys),
            rows_of(v, tile.keys),
            stored(out),
            lse,
            table,
            tokens,
            scale * LOG2_E.value,
            HEADS=heads,
            GROUPS=k.shape[1],
            D=width,
            BM=tile.queries,
            BN=tile.keys,
            STAGES=tile.stages,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return out, lse


def checked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds: torch.Tensor,
    longest: int,
    scale: float,
    blocks: Blocks | None,
) -> Blocks:
    """`blocks`, or new ones of these bounds. Raises ValueError as `attention` says."""
    if q.dtype not in TYPES or {k.dtype, v.dtype} != {q.dtype}:
        raise ValueError(
            f"q, k and v must be all bfloat16 or all float16, got {q.dtype}, {k.dtype}, {v.dtype}"
        )
    shapes = tuple(q.shape), tuple(k.shape), tuple(v.shape)
    if q.dim() != 3 or k.dim() != 3 or k.shape != v.shape or (len(k), k.shape[2]) != (len(q), q.shape[2]):
        raise ValueError(f"q must be [T, heads, D], k and v [T, groups, D], got {shapes}")
    heads, groups, width = q.shape[1], k.shape[1], q.shape[2]
    if not groups or heads % groups or not heads:
        raise ValueError(f"query heads must be a multiple of key-value heads, got {heads} and {groups}")
    if width not in WIDTHS:
        raise ValueError(f"a head must be one of {WIDTHS} wide, got {width}")
    if bounds.dtype != torch.int32 or bounds.dim() != 1 or len(bounds) < 2 or not bounds.is_contiguous():
        raise ValueError(f"bounds must be int32 [sequences + 1], got {bounds.dtype} {tuple(bounds.shape)}")
    devices = {x.device for x in (q, k, v, bounds)}
    if len(devices) != 1:
        raise ValueError(f"q, k, v and bounds must be on one device, got {', '.join(map(str, devices))}")
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale must be positive, got {scale}")
    if longest * (len(bounds) - 1) < len(q):
        raise ValueError(
            f"{len(bounds) - 1} sequences of at most {longest} tokens do not hold {len(q)} tokens"
        )
    if blocks is None:
        return Blocks(bounds, longest, len(q))
    if blocks.bounds is not bounds or blocks.tokens != len(q):
        raise ValueError(f"blocks must be of these bounds and of {len(q)} tokens, got {blocks.tokens} tokens")
    return blocks


def checked_tile(tile: Tile, *, of_queries: bool) -> Tile:
    """Raises ValueError for one that a program of queries, or of keys, cannot own."""
    own, other = (tile.queries, tile.keys) if of_queries else (tile.keys, tile.queries)
    if own % other:
        raise ValueError(f"a program's own block must be a multiple of the other, got {tile}")
    return tile


def rows_of(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """[T, heads, D] as [T, heads * D], taken a head and so many tokens at a time; a copy where the layout needs it."""
    width = x.shape[2]
    aligned = x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0  # bulk copies need 16 bytes
    if x.stride(2) != 1 or (x.shape[1] > 1 and x.stride(1) != width) or not aligned:
        x = x.clone(memory_format=torch.contiguous_format)
    flat = x.as_strided((len(x), x.shape[1] * width), (x.stride(0), 1))
    return TensorDescriptor.from_tensor(flat, [rows, width])


def stored(x: torch.Tensor) -> torch.Tensor:
    """As `store` writes it."""
    return as_stored(x) if x.dtype is torch.bfloat16 else x


@triton.jit
def store(pointer, values, mask, BF16: tl.constexpr):
    if BF16:
        tl.store(pointer, to_bf16(values), mask=mask)
    else:
        tl.store(pointer, values.to(tl.float16), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def _forward(
    q_desc,
    k_desc,
    v_desc,
    out,
    lse,
    table,
    tokens,
    scale2,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Heads go fastest, so that those of a group read their keys together. scale2: times log2(e)."""
    entry = table + tl.program_id(0) // HEADS * 4
    head = tl.program_id(0) % HEADS
    start, end, first = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    if start + first >= end:
        return
    column = head // (HEADS // GROUPS) * D
    q = q_desc.load([start + first, head * D])
    m = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    for key in tl.range(0, tl.minimum(first + BM, end - start), BN, num_stages=STAGES):
        k = k_desc.load([start + key, column])
        v = v_desc.load([start + key, column])
        s = tl.dot(q, k.T)
        if key + BN > first:  # on the diagonal; rows and keys beyond the sequence need no mask of their own
            seen = (first - key + tl.arange(0, BM))[:, None] >= tl.arange(0, BN)[None, :]
            s = tl.where(seen, s, float("-inf"))
        # Finite from the first block on, where every query has a key.
        new = tl.maximum(m, tl.max(s, 1) * scale2)
        p = tl.exp2(s * scale2 - new[:, None])
        shrink = tl.exp2(m - new)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
        m = new
    acc = acc * (1.0 / total)[:, None]
    row = (start + first + tl.arange(0, BM)).to(tl.int64)
    inside = row < end
    tl.store(lse + head.to(tl.int64) * tokens + row, (m + tl.log2(total)) * _LN_2, mask=inside)
    target = out + (row * (HEADS * D) + head * D)[:, None] + tl.arange(0, D)[None, :]
    store(target, acc, inside[:, None], q_desc.dtype == tl.bfloat16)
