"""Rows of tokens to the ranks that own their experts, and FC2's rows back: an all-to-all each way.

Experts are whole on the rank that owns them: a quantised expert, its scales and its products are those of one process.
By `kernels.slots` the layer then has the same bits as in one process, up to the order of sums within a library's GEMM.

A token's row goes once to each rank that owns any of its experts, beside a list of the slots that take it. It goes

    packed        quantised by the token's owner, 0.57 bytes an element (`kernels.packed_rows`)
    as it is      in the type of the hidden states, quantised by the experts' owner

and the operands of FC1 have the same bits either way, where a row's scales depend on that row alone. The gradient of
FC1's weights is taken at the row from before quantisation, which records do not hold: passes with a gradient move rows
as they are, and passes without one packed, if spec and back end allow it. FC2's rows, one for each slot, come back in
the type in which FC2 leaves them: the sum over a token's slots is its owner's, in the order that the spec says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from kernels.combine import sum_slots
from kernels.packed_rows import PackedRows
from kernels.slots import collect, gather, slot_coefficients, widened
from kernels.spec import ExecutionSpec, RouterPosition
from learner.rearrange import rearrange

# rows [R, H], packed or not, their experts int64 [R, 1] counted among the own, coefficients float32 [R, 1] -> [R, H]
OwnExperts = Callable[[torch.Tensor | PackedRows, torch.Tensor, torch.Tensor], torch.Tensor]
Pack = Callable[[torch.Tensor], PackedRows]
Collect = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, ExecutionSpec], torch.Tensor]


@dataclass(frozen=True)
class Exchange:
    """Rows ordered by rank: how many this rank sends to each, and how many it receives."""

    group: dist.ProcessGroup
    sent: list[int]
    received: list[int]

    def back(self) -> Exchange:
        return Exchange(self.group, self.received, self.sent)

    def move(self, rows: torch.Tensor) -> torch.Tensor:
        """[sum(sent), ...] -> [sum(received), ...]"""
        moved = rows.new_empty((sum(self.received), *rows.shape[1:]))
        dist.all_to_all_single(moved, rows.contiguous(), self.received, self.sent, group=self.group)
        return moved


@dataclass(frozen=True, eq=False)
class Routes:
    """Which rows and slots this rank sends where, and which it gets.

    rows: of a token's row for each rank that owns any of its experts; slots: of what belongs to a slot
    tokens: int64 [rows sent], the token of each
    order: int64 [T*k], the slots in the order in which they are sent; back: int64 [T, k], where each stands in that
    ids: int64 [slots received], the expert among the own; row_of_slot: int64 [slots received], the row among those
        received
    """

    rows: Exchange
    slots: Exchange
    tokens: torch.Tensor
    order: torch.Tensor
    back: torch.Tensor
    ids: torch.Tensor
    row_of_slot: torch.Tensor

    @classmethod
    def of(cls, topk_ids: torch.Tensor, experts: int, group: dist.ProcessGroup) -> Routes:
        """topk_ids: int64 [T, k], of all experts, of which each rank owns so many. Waits for the device."""
        ranks, device = group.size(), topk_ids.device
        owners = topk_ids // experts
        goes = (torch.arange(ranks, device=device)[:, None, None] == owners).any(2)  # [ranks, T]
        tokens = goes.nonzero()[:, 1]
        going = torch.stack((torch.bincount(owners.flatten(), minlength=ranks), goes.sum(1)), dim=1)
        coming = torch.empty_like(going)  # from each rank: slots, rows
        dist.all_to_all_single(coming, going, group=group)
        slots_sent, rows_sent, slots, rows = torch.cat((going, coming), dim=1).t().tolist()
        of_slots, of_rows = Exchange(group, slots_sent, slots), Exchange(group, rows_sent, rows)

        order = owners.flatten().argsort(stable=True)
        # A slot's row by its number among all that are sent, then among those that go to its rank.
        number = (goes.flatten().cumsum(0) - 1).view_as(goes).t().gather(1, owners)
        number -= _before(going[:, 1])[owners]
        described = torch.stack((topk_ids - owners * experts, number), dim=-1).flatten(0, 1)
        ids, number = of_slots.move(described[order]).unbind(1)
        first = _before(coming[:, 1]).repeat_interleave(coming[:, 0], output_size=sum(slots))
        back = order.argsort().view_as(topk_ids)
        return cls(of_rows, of_slots, tokens, order, back, ids, first + number)


def _before(counts: torch.Tensor) -> torch.Tensor:
    """The sum of the counts before each, int64 [N]."""
    return counts.cumsum(0) - counts


def expert_parallel(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    own_experts: OwnExperts,
    experts: int,
    spec: ExecutionSpec,
    group: dist.ProcessGroup,
    pack: Pack | None = None,
    collect: Collect = collect,
) -> torch.Tensor:
    """The expert layer's output [T, H] in x.dtype, of tokens x [T, H] of this rank; differentiable without `pack`.

    topk_ids: int64 [T, k], of all experts; topk_weights: float32 [T, k]; experts: how many each rank of the group owns;
    own_experts: those of this rank under `kernels.slots.slot_spec(spec)`; pack: makes a record of each row, which then
    travels in its place; collect: `kernels.slots.collect` for passes without gradient. All ranks of the group must come
    here, with `pack` or without. Raises ValueError for `pack` in a pass with gradients.
    """
    if pack is not None and torch.is_grad_enabled():
        raise ValueError(
            "packed rows have no gradient: they do not hold what the gradient of FC1's weights needs"
        )
    routes, wide = Routes.of(topk_ids, experts, group), widened(x, spec)
    rows = _RowsOfSlots.apply(wide, routes) if pack is None else _packed_rows(pack(x), routes)
    if spec.router_position is RouterPosition.FC2_OUTPUT:  # no slot has another coefficient than 1
        coefficients = topk_weights.new_ones(len(routes.ids), 1)
    else:
        sent = rearrange(slot_coefficients(topk_weights, spec), routes.order, routes.back.flatten())
        coefficients = _Move.apply(sent, routes.slots)
    computed = _Move.apply(own_experts(rows, routes.ids[:, None], coefficients), routes.slots.back())
    if not torch.is_grad_enabled():
        return collect(computed, routes.back, topk_ids, topk_weights, spec).to(x.dtype)
    slots = rearrange(computed, routes.back.flatten(), routes.order)
    return gather(slots, topk_ids, topk_weights, spec).to(x.dtype)


def _packed_rows(own: PackedRows, routes: Routes) -> PackedRows:
    """Of the tokens of this rank -> of the slots that come to it."""
    records = routes.rows.move(own.records.index_select(0, routes.tokens))
    return replace(own, records=records, index=routes.row_of_slot)


class _RowsOfSlots(torch.autograd.Function):
    """`kernels.slots.spread` from ranks to ranks: rows of tokens [T, H] -> of the slots that come here [R, H]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, routes: Routes) -> torch.Tensor:
        ctx.save_for_backward(routes.back)
        ctx.exchange = routes.slots
        rows = routes.rows.move(x.index_select(0, routes.tokens))
        return rows.index_select(0, routes.row_of_slot)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (back,) = ctx.saved_tensors
        slots = ctx.exchange.back().move(gradients[0]).index_select(0, back.flatten())
        return sum_slots(slots.view(*back.shape, slots.shape[1])).to(slots.dtype), None


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        ctx.exchange = exchange
        return exchange.move(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.exchange.back().move(gradients[0]), None
