"""Whole experts shared out over the ranks of an engine. The layer's output has the bits that one rank would compute.

Attention leaves every token on every rank. Each rank computes the slots of its own experts (`kernels.slots`), from the
same rows in the same order as one rank would, and every other slot is -0 there, the one number that changes no other
when it is added. So a sum over the ranks puts all slots together exactly, and each rank combines them as the spec says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.backends import ExpertKernels
from kernels.shard import Shard
from kernels.slots import slot_coefficients, spread
from kernels.spec import ExecutionSpec

# rows [R, H], their experts integer [R, 1] counted among the own, coefficients float32 [R, 1] -> [R, H]
OwnExperts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class SharedExperts:
    """own: this rank's experts among all. add_up: a tensor of each rank -> their sum, on all of them."""

    own: Shard
    add_up: Callable[[torch.Tensor], torch.Tensor]

    def layer(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        coefficients: torch.Tensor,
        own_experts: OwnExperts,
        kernels: ExpertKernels,
        spec: ExecutionSpec,
    ) -> torch.Tensor:
        """The output [T, H] of tokens x [T, H], which all ranks have. ids: integer [T, k], of all experts;
        coefficients: float32 [T, k]; own_experts: by `kernels`, under `slot_spec(spec)`. All ranks must come here with
        the same.
        """
        slots = self._own_slots(x, ids, coefficients, own_experts, kernels, spec)
        places = torch.arange(ids.numel(), device=ids.device).view(ids.shape)
        return kernels.collect(self.add_up(slots), places, ids, coefficients, spec)

    def _own_slots(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        coefficients: torch.Tensor,
        own_experts: OwnExperts,
        kernels: ExpertKernels,
        spec: ExecutionSpec,
    ) -> torch.Tensor:
        """[T*k, H], -0 in the slots of other ranks' experts."""
        rows = spread(x, ids.shape[1], spec)
        numbers = ids.reshape(-1, 1) - self.own.start
        here = (numbers >= 0) & (numbers < self.own.length)
        factors = slot_coefficients(coefficients, spec)
        if kernels.absent_slots:
            computed = own_experts(rows, torch.where(here, numbers, -1), factors)
            return torch.where(here, computed, -0.0)
        chosen = here.flatten().nonzero().flatten()
        computed = own_experts(rows[chosen], numbers[chosen], factors[chosen])
        return computed.new_full((len(rows), computed.shape[1]), -0.0).index_copy_(0, chosen, computed)


def shared_experts(experts: int, rank: int, ranks: int) -> SharedExperts | None:
    """This rank's share of `experts`; None where one rank has all."""
    if ranks == 1:
        return None
    from vllm.distributed import tensor_model_parallel_all_reduce

    return SharedExperts(Shard.even(0, experts, rank, ranks), tensor_model_parallel_all_reduce)
