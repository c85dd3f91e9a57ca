"""Modules that stand in for Megatron's own in its specs: they run on any device, without Transformer
Engine.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from learner.megatron_api import TransformerConfig, TransformerLayer
from learner.replay import RouteReplay


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, in FP32 inside (Zhang and Sennrich 2019, arXiv 1910.07467). BF16 on
    a GPU takes one kernel, and one for the gradient.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_cuda and x.dtype is torch.bfloat16:
            return _Normed.apply(x, self.weight, self.eps)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class _Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        from kernels.triton.outside.rms_norm import rms_norm  # needs a GPU

        rows = x.reshape(-1, x.shape[-1])
        normed, inverse = rms_norm(rows, weight, eps)
        ctx.save_for_backward(rows, weight, inverse)
        return normed.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        from kernels.triton.outside.rms_norm import rms_norm_gradient

        d_normed = gradients[0].reshape(-1, gradients[0].shape[-1])
        d_x, d_weight = rms_norm_gradient(d_normed, *ctx.saved_tensors)
        return d_x.view(gradients[0].shape), d_weight, None


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
