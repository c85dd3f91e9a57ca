"""Values of token slots in a row with a place for every expert: the gradient of choosing experts.

No two slots of a token name the same expert, so that nothing is added up and the order of writes does not matter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TOKENS = 32  # a program


def to_experts(values: torch.Tensor, ids: torch.Tensor, experts: int) -> torch.Tensor:
    """float32 [T, k] at int64 ids [T, k], each different within its row -> float32 [T, experts], zero elsewhere.

    Raises ValueError for other types or shapes.
    """
    if values.dtype != torch.float32 or ids.dtype != torch.int64 or values.shape != ids.shape:
        found = f"{values.dtype} {tuple(values.shape)} and {ids.dtype} {tuple(ids.shape)}"
        raise ValueError(f"slots must be float32 and int64 [T, k], got {found}")
    tokens, top_k = ids.shape
    dense = values.new_empty(tokens, experts)
    if dense.numel():
        _to_experts[(triton.cdiv(tokens, _TOKENS),)](
            values.contiguous(),
            ids.contiguous(),
            dense,
            tokens,
            EXPERTS=experts,
            PADDED=triton.next_power_of_2(experts),
            TOP_K=top_k,
            TOKENS=_TOKENS,
        )
    return dense


@triton.jit
def _to_experts(
    values,
    ids,
    dense,
    tokens,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    TOP_K: tl.constexpr,
    TOKENS: tl.constexpr,
):
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    expert = tl.arange(0, PADDED)[None, :]
    inside = token < tokens
    row = tl.zeros((TOKENS, PADDED), tl.float32)
    for slot in tl.static_range(TOP_K):
        own = tl.load(ids + token * TOP_K + slot, mask=inside, other=-1)
        value = tl.load(values + token * TOP_K + slot, mask=inside, other=0.0)
        row = tl.where(own[:, None] == expert, value[:, None], row)
    tl.store(dense + token[:, None] * EXPERTS + expert, row, mask=inside[:, None] & (expert < EXPERTS))
