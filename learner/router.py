"""Megatron's router, whose choice goes to the experts as slots: k experts of each token and their coefficients."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from kernels.routing import sort_slots
from learner.megatron_api import TopKRouter
from learner.replay import RouteReplay
from learner.widened import widened_product


class Router(TopKRouter):
    """Router logits in FP32, whatever the type of the model, and experts that may be given.

    Megatron's own `gating` moves the weight to a GPU and needs Transformer Engine's GEMM, its `routing` spreads the
    choice over a map of all experts, and its `RouterReplay` keeps the routers of all models of a process in one list.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.router_replay = RouteReplay()

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """[..., H] -> float32 [..., E]."""
        narrow = self.weight.detach() if self.weight.dtype is torch.bfloat16 else None
        logits = widened_product(input.flatten(0, -2), self.weight.float(), narrow)
        return logits.view(*input.shape[:-1], -1)

    def routing(self, logits: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 [..., E] -> coefficients float32 [T, k] and experts int64 [T, k], in the order of
        `kernels.routing.sort_slots`. Megatron's layer hands both to the dispatcher as they are.

        Coefficients are a softmax over all experts, or, where they are renormalised, over those that were chosen.
        """
        scores = logits.view(-1, self.config.num_moe_experts)
        over_all = self.config.moe_router_pre_softmax
        scores = scores.softmax(-1) if over_all else scores
        ids = self.router_replay.choose(scores.detach().topk(self.topk).indices, scores.shape[1])
        known = scores.detach().gather(1, ids)
        ids = _ordered(ids, known if over_all else known.softmax(-1))
        coefficients = at_experts(scores, ids)
        return coefficients if over_all else coefficients.softmax(-1), ids


def at_experts(scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """scores [T, E] at int64 ids [T, k], each different within its row -> [T, k]."""
    return _Chosen.apply(scores, ids)


def _ordered(ids: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
    if not ids.is_cuda:
        return sort_slots(ids, coefficients)[0]
    from kernels.triton import slot_order  # needs a GPU

    return slot_order.sort_slots(ids, coefficients)[0]


class _Chosen(torch.autograd.Function):
    """The gradient of indexing in general is added up, by a sort where it must be deterministic; here no element is
    read twice.
    """

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.experts = scores.shape[1]
        return scores.gather(1, ids)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        [ids], [gradient] = ctx.saved_tensors, gradients
        if not gradient.is_cuda:
            return gradient.new_zeros(len(ids), ctx.experts).scatter_(1, ids, gradient), None
        from kernels.triton.outside.choice import to_experts  # needs a GPU

        return to_experts(gradient, ids, ctx.experts), None
