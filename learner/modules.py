"""Modules that stand in for Megatron's own in its specs: they run on any device, without Transformer
Engine.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from learner.megatron_api import (
    MegatronModule,
    RotaryEmbedding,
    TopKRouter,
    TransformerConfig,
    TransformerLayer,
)
from learner.packing import Packing
from learner.replay import RouteReplay


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, in FP32 inside (Zhang and Sennrich 2019, arXiv
    1910.07467).
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class CausalAttention(MegatronModule):
    """Megatron's core attention by torch's scaled dot product: causal, grouped queries, no dropout.

    Sequences are padded on the right, so causality alone keeps padding out of every real position.
    """

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Packing,
        **_: Any,
    ) -> torch.Tensor:
        """query [T, 1, heads, D], key and value [T, 1, groups, D] -> [T, 1, heads * D]; attention_mask: which of the
        packed tokens are one sequence. Tokens behind those belong to none, and get zeros.
        """
        packed = len(attention_mask.sequences)
        q, k, v = (
            attention_mask.unpack(tensor[:packed].squeeze(1)).transpose(1, 2)
            for tensor in (query, key, value)
        )
        grouped = q.shape[1] != k.shape[1]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=grouped)
        mixed = attention_mask.pack(mixed.transpose(1, 2)).flatten(1).unsqueeze(1)
        return F.pad(mixed, (0, 0, 0, 0, 0, len(query) - packed)) if len(query) > packed else mixed


class RecomputedLayer(TransformerLayer):
    """A layer that keeps nothing but its input for the gradient, and computes the rest again."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        replay: RouteReplay = self.mlp.router.router_replay
        routes, forward = replay.routes, super().forward

        def again(*args: Any, **kwargs: Any) -> Any:
            with replay.following(routes):
                return forward(*args, **kwargs)

        return checkpoint(again, *args, use_reentrant=False, **kwargs)


class Router(TopKRouter):
    """Router logits in FP32, whatever the type of the model, and experts that may be given.

    Megatron's own `gating` moves the weight to a GPU and needs Transformer Engine's GEMM; its `RouterReplay` keeps the
    routers of all models of a process in one list.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.router_replay = RouteReplay()

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """[..., H] -> float32 [..., E]."""
        return F.linear(input.float(), self.weight.float())


class Rotary(RotaryEmbedding):
    """Rotary angles on the device of the model; Megatron's own moves them to a GPU."""

    def get_emb(self, max_seq_len: int, offset: int = 0) -> torch.Tensor:
        """float32 [S, 1, 1, D], each half of D holding the same angles."""
        angles = self.get_freqs_non_repeated(max_seq_len, offset)
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]
