"""The order of a token's slots, `kernels.routing.sort_slots`, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_SLOTS_AT_A_TIME = 256


def sort_slots(
    ids: torch.Tensor, coefficients: torch.Tensor, places: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `kernels.routing.sort_slots`, without gradients; NaN counts as the largest coefficient.

    ids: int32 or int64 [T, k]; coefficients: float32 [T, k]. places: int64 [T], negative for rows that are no tokens:
    their slots get the id -1, which no expert has, and the coefficient 0.
    """
    ids, coefficients = ids.contiguous(), coefficients.detach().contiguous()
    tokens, k = ids.shape
    order, sorted_ = torch.empty_like(ids), torch.empty_like(coefficients)
    width = triton.next_power_of_2(k)
    rows = max(1, _SLOTS_AT_A_TIME // width)
    if tokens:
        _sort[(triton.cdiv(tokens, rows),)](
            ids,
            coefficients,
            ids if places is None else places,
            order,
            sorted_,
            tokens,
            K=k,
            WIDTH=width,
            ROWS=rows,
            PADDED=places is not None,
            num_warps=1,
        )
    return order, sorted_


@triton.jit
def _sort(
    ids_ptr,
    p_ptr,
    places_ptr,
    ids_out_ptr,
    p_out_ptr,
    tokens,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """A slot's place is the number of slots of its token that stand before it."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, WIDTH)
    inside = (row < tokens)[:, None] & (j < K)[None, :]
    at = row.to(tl.int64)[:, None] * K + j[None, :]
    ids = tl.load(ids_ptr + at, mask=inside, other=0)
    p = tl.load(p_ptr + at, mask=inside, other=0.0)
    key = tl.where(p != p, float("inf"), p)
    place = tl.zeros((ROWS, WIDTH), tl.int32)
    for i in tl.static_range(K):
        other_at = row.to(tl.int64) * K + i
        other_id = tl.load(ids_ptr + other_at, mask=row < tokens, other=0)[:, None]
        other_p = tl.load(p_ptr + other_at, mask=row < tokens, other=0.0)[:, None]
        other = tl.where(other_p != other_p, float("inf"), other_p)
        alike = (other_id < ids) | ((other_id == ids) & (i < j)[None, :])
        place += ((other > key) | ((other == key) & alike)).to(tl.int32)
    if PADDED:
        empty = tl.load(places_ptr + row, mask=row < tokens, other=0)[:, None] < 0
        ids = tl.where(empty, -1, ids)
        p = tl.where(empty, 0.0, p)
    out = row.to(tl.int64)[:, None] * K + place
    tl.store(ids_out_ptr + out, ids, mask=inside)
    tl.store(p_out_ptr + out, p, mask=inside)
