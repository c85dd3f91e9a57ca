"""Causal attention over packed sequences, rotary positions included, in the place of Megatron's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from learner.megatron_api import MegatronModule, TransformerConfig
from learner.packing import Packing
from learner.rotary import Rotary, rotate


@dataclass(frozen=True, eq=False)
class AttentionInput:
    """What attention must know of the packed tokens, once for all layers: Megatron hands its mask on as it is.

    rotary: of each token; None under a strict spec, whose attention has tables of its own.
    """

    packing: Packing
    rotary: Rotary | None


class CausalAttention(MegatronModule):
    """Core attention: rotary positions, then causal scaled dot products, grouped queries, no dropout.

    On a GPU and in 16 bits sequences stay packed (`kernels.triton.outside`). Elsewhere they are padded on the right,
    where causality alone keeps padding out of every real position.
    """

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: AttentionInput,
        **_: Any,
    ) -> torch.Tensor:
        """query [T, 1, heads, D], key and value [T, 1, groups, D] -> [T, 1, heads * D]. Tokens behind those that are
        packed belong to no sequence, and get zeros.
        """
        packing, rotary = attention_mask.packing, attention_mask.rotary
        assert rotary is not None
        packed = len(packing.sequences)
        q, k, v = (tensor[:packed].squeeze(1) for tensor in (query, key, value))
        q, k = rotate(q, rotary), rotate(k, rotary)
        scale = self.scale or q.shape[2] ** -0.5
        mixed = (_packed if _kernels_take(q) else _padded)(q, k, v, packing, scale).flatten(1).unsqueeze(1)
        return F.pad(mixed, (0, 0, 0, 0, 0, len(query) - packed)) if len(query) > packed else mixed


def _kernels_take(q: torch.Tensor) -> bool:
    if not q.is_cuda:
        return False
    from kernels.triton.outside.attention import TYPES, WIDTHS  # needs a GPU

    return q.dtype in TYPES and q.shape[2] in WIDTHS


def _packed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packing: Packing, scale: float
) -> torch.Tensor:
    """[T, heads, D], twice [T, groups, D] -> [T, heads, D]"""
    return _Attention.apply(q, k, v, packing, scale)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packing: Packing, scale: float
    ) -> torch.Tensor:
        from kernels.triton.outside.attention import attention  # needs a GPU

        blocks = packing.blocks
        out, lse = attention(q, k, v, packing.bounds, packing.longest, scale, blocks=blocks)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.packing, ctx.scale = packing, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        from kernels.triton.outside.attention_gradient import attention_gradient

        packing: Packing = ctx.packing
        settings = packing.bounds, packing.longest, ctx.scale
        found = attention_gradient(gradients[0], *ctx.saved_tensors, *settings, blocks=packing.blocks)
        return *found, None, None


def _padded(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packing: Packing, scale: float
) -> torch.Tensor:
    """As `_packed`, of any type on any device."""
    grouped = q.shape[1] != k.shape[1]
    parts = []
    for tokens, own in packing.alike:
        padded = [own.unpack(tensor[tokens]).transpose(1, 2) for tensor in (q, k, v)]
        mixed = F.scaled_dot_product_attention(*padded, is_causal=True, scale=scale, enable_gqa=grouped)
        parts.append(own.pack(mixed.transpose(1, 2)))
    return torch.cat(parts) if len(parts) > 1 else parts[0]
