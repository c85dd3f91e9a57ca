"""Slots of tokens to the ranks that own their experts, and their rows back: an all-to-all each way.

Experts are whole on the rank that owns them: a quantised expert, its scales and its products are those of one process.
By `kernels.slots` the layer then has the same bits as in one process, up to the order of sums within a library's GEMM.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from kernels.slots import gather, slot_coefficients, spread
from kernels.spec import ExecutionSpec
from learner.rearrange import rearrange

# rows [R, H], their experts int64 [R, 1] counted among the own, coefficients float32 [R, 1] -> [R, H]
OwnExperts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Exchange:
    """Rows ordered by rank: how many this rank sends to each, and how many it receives."""

    group: dist.ProcessGroup
    sent: list[int]
    received: list[int]

    @classmethod
    def of(cls, owners: torch.Tensor, group: dist.ProcessGroup) -> Exchange:
        """owners: int64 [R], the rank to which each row goes."""
        sent = torch.bincount(owners, minlength=group.size())
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return cls(group, sent.tolist(), received.tolist())

    def back(self) -> Exchange:
        return Exchange(self.group, self.received, self.sent)

    def move(self, rows: torch.Tensor) -> torch.Tensor:
        """[sum(sent), ...] -> [sum(received), ...]"""
        moved = rows.new_empty((sum(self.received), *rows.shape[1:]))
        dist.all_to_all_single(moved, rows.contiguous(), self.received, self.sent, group=self.group)
        return moved


def expert_parallel(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    own_experts: OwnExperts,
    experts: int,
    spec: ExecutionSpec,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """The expert layer's output [T, H] in x.dtype, of tokens x [T, H] of this rank; differentiable.

    topk_ids: int64 [T, k], of all experts; topk_weights: float32 [T, k]; experts: how many each rank of the group owns;
    own_experts: those of this rank under `kernels.slots.slot_spec(spec)`. All ranks of the group must come here.
    """
    flat = topk_ids.flatten()
    owners = flat // experts
    order = owners.argsort(stable=True)
    back = order.argsort()
    exchange = Exchange.of(owners, group)
    rows = _Move.apply(rearrange(spread(x, topk_ids.shape[1], spec), order, back), exchange)
    coefficients = _Move.apply(rearrange(slot_coefficients(topk_weights, spec), order, back), exchange)
    own_ids = exchange.move((flat - owners * experts)[order])
    computed = own_experts(rows, own_ids[:, None], coefficients)
    slots = rearrange(_Move.apply(computed, exchange.back()), back, order)
    return gather(slots, topk_ids, topk_weights, spec).to(x.dtype)


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        ctx.exchange = exchange
        return exchange.move(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.exchange.back().move(gradients[0]), None
