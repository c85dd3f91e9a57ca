"""The gradient of causal attention over packed sequences, without atomics.

Two kernels: one whose programs own a block of queries, for dQ, and one whose programs own a block of keys and go
through all query heads of its group, for dK and dV. Both multiply queries and keys anew; sums have the fixed order that
`kernels.triton.outside.attention` describes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.triton.outside.attention import LOG2_E, checked, checked_tile, rows_of, store, stored
from kernels.triton.outside.attention_blocks import Blocks, Tile, Tiling, tiling


def attention_gradient(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    bounds: torch.Tensor,
    longest: int,
    scale: float,
    *,
    blocks: Blocks | None = None,
    tiles: Tiling | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v, contiguous and in their type, from that of `out` [T, heads, D]; the rest is as
    `attention` took and returned it. Raises ValueError as that does.
    """
    blocks = checked(q, k, v, bounds, longest, scale, blocks)
    _check_results(q, out, d_out, lse)
    tiles = tiles or tiling(q.shape[2])
    checked_tile(tiles.d_query, of_queries=True)
    checked_tile(tiles.d_key, of_queries=False)
    if tiles.d_query.queries % tiles.d_key.queries:
        raise ValueError(f"blocks of queries must be a multiple of those of the keys' kernel, got {tiles}")
    if not len(q):
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    d_q, rows = query_gradient(d_out, q, k, v, out, lse, scale, blocks, tiles.d_query)
    return d_q, *key_gradient(d_out, q, k, v, rows, scale, blocks, tiles.d_key)


class QueryRows(NamedTuple):
    """What `key_gradient` takes of every query, float32 [heads, R]: lse times log2(e), and sum(dO * O). R has room for
    the whole blocks of every sequence, `block` rows each.
    """

    exponents: torch.Tensor
    deltas: torch.Tensor
    block: int


def query_gradient(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    blocks: Blocks,
    tile: Tile,
) -> tuple[torch.Tensor, QueryRows]:
    """Of operands that `attention_gradient` has checked, at least one token."""
    tokens, heads, width = q.shape
    room = (tokens // tile.queries + len(blocks.bounds) - 1) * tile.queries  # see `_place`
    exponents, deltas = (torch.empty(heads, room, dtype=torch.float32, device=q.device) for _ in range(2))
    d_q = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    table = blocks.of_queries(tile.queries)
    _query_gradient[(len(table) * heads,)](
        rows_of(q, tile.queries),
        rows_of(k, tile.keys),
        rows_of(v, tile.keys),
        rows_of(out, tile.queries),
        rows_of(d_out, tile.queries),
        lse,
        exponents,
        deltas,
        stored(d_q),
        table,
        tokens,
        room,
        scale,
        HEADS=heads,
        GROUPS=k.shape[1],
        D=width,
        BM=tile.queries,
        BN=tile.keys,
        STAGES=tile.stages,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return d_q, QueryRows(exponents, deltas, tile.queries)


def key_gradient(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: QueryRows,
    scale: float,
    blocks: Blocks,
    tile: Tile,
) -> tuple[torch.Tensor, torch.Tensor]:
    """dK and dV; as `query_gradient`, which comes first."""
    heads, groups, width = q.shape[1], k.shape[1], q.shape[2]
    d_k, d_v = (torch.empty(k.shape, dtype=k.dtype, device=k.device) for _ in range(2))
    table = blocks.of_keys(tile.keys)
    _key_gradient[(len(table) * groups,)](
        rows_of(q, tile.queries),
        rows_of(k, tile.keys),
        rows_of(v, tile.keys),
        rows_of(d_out, tile.queries),
        rows.exponents,
        rows.deltas,
        rows.exponents.shape[1],
        stored(d_k),
        stored(d_v),
        table,
        scale,
        HEADS=heads,
        GROUPS=groups,
        D=width,
        BM=tile.queries,
        BN=tile.keys,
        PAD=rows.block,
        STAGES=tile.stages,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return d_k, d_v


def _check_results(q: torch.Tensor, out: torch.Tensor, d_out: torch.Tensor, lse: torch.Tensor) -> None:
    for name, tensor in (("out", out), ("d_out", d_out)):
        if tensor.shape != q.shape or tensor.dtype != q.dtype:
            expected, found = f"{q.dtype} {tuple(q.shape)}", f"{tensor.dtype} {tuple(tensor.shape)}"
            raise ValueError(f"{name} must be {expected} as q, got {found}")
    shape = (q.shape[1], len(q))
    if lse.dtype != torch.float32 or tuple(lse.shape) != shape or not lse.is_contiguous():
        raise ValueError(f"lse must be contiguous float32 {shape}, got {lse.dtype} {tuple(lse.shape)}")


@triton.jit
def _place(start, sequence, BLOCK: tl.constexpr):
    """Where a sequence begins among rows that give each sequence whole blocks: floor(a + b) + 1 is at least
    floor(a) + ceil(b), so that sequences do not overlap.
    """
    return (start // BLOCK + sequence) * BLOCK


@triton.jit(do_not_specialize=["tokens", "room"])
def _query_gradient(
    q_desc,
    k_desc,
    v_desc,
    out_desc,
    d_out_desc,
    lse,
    exponents,
    deltas,
    d_q,
    table,
    tokens,
    room,
    scale,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dQ, and for `_key_gradient` of every row of the block: lse times log2(e), and delta = sum(dO * O). Rows beyond
    the sequence get infinity, so that their probabilities are zero.
    """
    entry = table + tl.program_id(0) // HEADS * 4
    head = tl.program_id(0) % HEADS
    start, end, first = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    if start + first >= end:
        return
    column = head // (HEADS // GROUPS) * D
    q = q_desc.load([start + first, head * D])
    d_out = d_out_desc.load([start + first, head * D])
    out = out_desc.load([start + first, head * D])
    row = (start + first + tl.arange(0, BM)).to(tl.int64)
    inside = row < end
    delta = tl.where(inside, tl.sum(out.to(tl.float32) * d_out.to(tl.float32), 1), 0.0)
    exponent = tl.load(lse + head.to(tl.int64) * tokens + row, mask=inside, other=float("inf")) * LOG2_E
    place = head.to(tl.int64) * room + _place(start, tl.load(entry + 3), BM) + first + tl.arange(0, BM)
    tl.store(exponents + place, exponent)
    tl.store(deltas + place, delta)
    acc = tl.zeros((BM, D), tl.float32)
    for key in tl.range(0, tl.minimum(first + BM, end - start), BN, num_stages=STAGES):
        k = k_desc.load([start + key, column])
        v = v_desc.load([start + key, column])
        s = tl.dot(q, k.T)
        d_p = tl.dot(d_out, v.T)
        p = tl.exp2(s * (scale * LOG2_E) - exponent[:, None])
        if key + BN > first:
            seen = (first - key + tl.arange(0, BM))[:, None] >= tl.arange(0, BN)[None, :]
            p = tl.where(seen, p, 0.0)
        d_s = p * (d_p - delta[:, None])
        acc = tl.dot(d_s.to(k.dtype), k, acc)
    target = d_q + (row * (HEADS * D) + head * D)[:, None] + tl.arange(0, D)[None, :]
    store(target, acc * scale, inside[:, None], q_desc.dtype == tl.bfloat16)


@triton.jit(do_not_specialize=["room"])
def _key_gradient(
    q_desc,
    k_desc,
    v_desc,
    d_out_desc,
    exponents,
    deltas,
    room,
    d_k,
    d_v,
    table,
    scale,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    PAD: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dK and dV of a block of keys: first the blocks of queries on the diagonal, of all heads, then those below it.
    PAD: rows of `_query_gradient`'s blocks.
    """
    entry = table + tl.program_id(0) // GROUPS * 4
    group = tl.program_id(0) % GROUPS
    start, end, first = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    if start + first >= end:
        return
    place = _place(start, tl.load(entry + 3), PAD)
    k = k_desc.load([start + first, group * D])
    v = v_desc.load([start + first, group * D])
    key_sum = tl.zeros((BN, D), tl.float32)
    value_sum = tl.zeros((BN, D), tl.float32)
    length = end - start
    low, high = first, tl.minimum(first + BN, length)
    for masked in tl.static_range(2):
        key_sum, value_sum = _sum_queries(
            key_sum,
            value_sum,
            k,
            v,
            q_desc,
            d_out_desc,
            exponents,
            deltas,
            room,
            start,
            place,
            first,
            low,
            high,
            group,
            scale,
            HEADS // GROUPS,
            D,
            BM,
            BN,
            STAGES,
            masked == 0,
        )
        low, high = first + BN, length
    row = (start + first + tl.arange(0, BN)).to(tl.int64)
    inside = (row < end)[:, None]
    target = (row * (GROUPS * D) + group * D)[:, None] + tl.arange(0, D)[None, :]
    store(d_k + target, key_sum * scale, inside, q_desc.dtype == tl.bfloat16)
    store(d_v + target, value_sum, inside, q_desc.dtype == tl.bfloat16)


@triton.jit
def _sum_queries(
    key_sum,
    value_sum,
    k,
    v,
    q_desc,
    d_out_desc,
    exponents,
    deltas,
    room,
    start,
    place,
    first,
    low,
    high,
    group,
    scale,
    SHARE: tl.constexpr,
    D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Queries from `low` to `high` of all SHARE heads of the group, in one loop, so that copies ahead never pause. No
    branch within it decides on the mask: ptxas would let every product wait for the one before. And it divides by
    constants alone: with a division by the number of blocks, sums of 9 heads 64 wide were wrong on an H200 (Triton
    3.6.0), otherwise at every call; a barrier in the loop hid it.
    """
    count = tl.maximum(high - low + BM - 1, 0) // BM
    for i in tl.range(0, count * SHARE, num_stages=STAGES):
        head = group * SHARE + i % SHARE
        query = low + i // SHARE * BM
        q = q_desc.load([start + query, head * D])
        d_out = d_out_desc.load([start + query, head * D])
        row = head.to(tl.int64) * room + place + query + tl.arange(0, BM)
        exponent = tl.load(exponents + row)[None, :]
        delta = tl.load(deltas + row)[None, :]
        s = tl.dot(k, q.T)  # transposed, as d_p: [keys, queries]
        p = tl.exp2(s * (scale * LOG2_E) - exponent)
        if MASKED:
            seen = (query - first + tl.arange(0, BM))[None, :] >= tl.arange(0, BN)[:, None]
            p = tl.where(seen, p, 0.0)
        value_sum = tl.dot(p.to(d_out.dtype), d_out, value_sum)
        d_p = tl.dot(v, d_out.T)
        d_s = p * (d_p - delta)
        key_sum = tl.dot(d_s.to(q.dtype), q, key_sum)
    return key_sum, value_sum
