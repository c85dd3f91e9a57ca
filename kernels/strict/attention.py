"""Causal attention with grouped queries, over keys counted from position 0.

    s = (q k) * scale       exact product of fixed-point rows, one rounding to FP32, one FP32 product
    p = exp(s - max s)      FP32; 0 for keys behind the query
    o = (sum p v) / (sum p)

In the sum of p v each v is a row of fixed-point integers with a power of two of its own, which goes to p; p times this
power is then a row of fixed-point integers, too, whose scale comes from the query's own keys alone. So both products
are exact as `kernels.strict.fixed_point` says, in segments of 1024 keys. The sum of p adds halves (`halves_sum`). Keys
beyond the last one contribute zeros, however many there are: paging, chunks and padding cannot matter.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.model_spec import Products
from kernels.strict.elementary import exp, halves_sum
from kernels.strict.fixed_point import (
    ACTIVATION_BITS,
    WEIGHT_BITS,
    fixed_point,
    product,
    segments_product,
)
from kernels.strict.gradient import with_gradient_of

_SCORES = {"cpu": 1 << 22, "cuda": 1 << 26}  # scores that are held at once, about


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    first: torch.Tensor,
    scale: float,
    rule: Products,
) -> torch.Tensor:
    """query [B, Q, heads, D]; key, value [B, L, groups, D] from position 0 on; first: int64 [B], the position of each
    row's first query. -> [B, Q, heads, D] in query.dtype, differentiable in query, key and value.

    Query i of row b sees keys 0 to first[b] + i; what stands behind them must be finite and does not matter.
    """
    positions = first[:, None] + torch.arange(query.shape[1], device=query.device)
    keys = torch.arange(key.shape[1], device=key.device)

    def behind(
        positions: torch.Tensor,
    ) -> torch.Tensor:  # [B, Q, L], made anew rather than kept for the gradient
        return keys > positions[:, :, None]

    def usual(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
        mixed = F.scaled_dot_product_attention(
            q, k, v, attn_mask=~behind(positions)[:, None], scale=scale, enable_gqa=True
        )
        return mixed.transpose(1, 2)

    def strict(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        most = _SCORES[query.device.type]
        rows = max(1, most // (query.shape[0] * query.shape[2] * key.shape[1]))
        parts = zip(query.split(rows, dim=1), positions.split(rows, dim=1), strict=True)
        return torch.cat([_attend(part, key, value, behind(own), scale) for part, own in parts], dim=1)

    if rule is Products.LIBRARY:
        return usual(query, key, value)
    return with_gradient_of(usual, strict, query, key, value)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, hidden: torch.Tensor, scale: float
) -> torch.Tensor:
    batch, queries, heads, width = query.shape
    groups = key.shape[2]
    shared = heads // groups
    # [B, groups, shared * Q, D]: the queries that share a group's keys are the rows of one product.
    q = query.view(batch, queries, groups, shared, width).permute(0, 2, 3, 1, 4).flatten(2, 3)
    k = fixed_point(key.transpose(1, 2), WEIGHT_BITS)
    v = fixed_point(value.transpose(1, 2), WEIGHT_BITS)
    scores = product(fixed_point(q, ACTIVATION_BITS), k) * scale
    mask = hidden[:, None].repeat(1, 1, shared, 1)
    scores = scores.masked_fill_(mask, -torch.inf)
    weights = exp(scores - scores.amax(-1, keepdim=True))  # 0 where hidden
    scaled = fixed_point(weights * v.scale.transpose(-1, -2), ACTIVATION_BITS)
    total = segments_product(scaled.integers, v.integers).mul_(scaled.scale).float()
    mixed = total / halves_sum(weights)
    return (
        mixed.view(batch, groups, shared, queries, width).permute(0, 3, 1, 2, 4).flatten(2, 3).to(query.dtype)
    )
