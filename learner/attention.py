"""Causal attention over packed sequences, rotary positions included: torch's kernels in the place of Megatron's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from learner.megatron_api import MegatronModule, TransformerConfig
from learner.packing import Packing
from learner.rotary import Rotary, rotate

_FLASH_TYPES = (torch.bfloat16, torch.float16)
_FLASH_WIDTH = 256  # of a head, at most


@dataclass(frozen=True, eq=False)
class AttentionInput:
    """What attention must know of the packed tokens, once for all layers: Megatron hands its mask on as it is.

    rotary: of each token; None under a strict spec, whose attention has tables of its own.
    """

    packing: Packing
    rotary: Rotary | None


class CausalAttention(MegatronModule):
    """Core attention: rotary positions, then causal scaled dot products, grouped queries, no dropout.

    On a GPU and in 16 bits by FlashAttention, which takes sequences packed as they are (Dao 2023, arXiv 2307.08691).
    Elsewhere sequences are padded on the right, where causality alone keeps padding out of every real position.
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
        flash = q.is_cuda and q.dtype in _FLASH_TYPES and q.shape[2] <= _FLASH_WIDTH
        mixed = (_flash if flash else _padded)(q, k, v, packing, self.scale).flatten(1).unsqueeze(1)
        return F.pad(mixed, (0, 0, 0, 0, 0, len(query) - packed)) if len(query) > packed else mixed


def _flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packing: Packing, scale: float | None
) -> torch.Tensor:
    """[T, heads, D], twice [T, groups, D] -> [T, heads, D]"""
    bounds, longest = packing.bounds, packing.longest
    return torch.ops.aten._flash_attention_forward(
        q, k, v, bounds, bounds, longest, longest, 0.0, True, False, scale=scale
    )[0]


def _padded(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packing: Packing, scale: float | None
) -> torch.Tensor:
    """As `_flash`, of any type on any device."""
    grouped = q.shape[1] != k.shape[1]
    q, k, v = (packing.unpack(tensor).transpose(1, 2) for tensor in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    return packing.pack(mixed.transpose(1, 2))
