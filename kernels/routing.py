"""Token slots: their order, and their grouping by the expert that computes them.

A slot is a (token, position in its top-k list) pair; slot number t*k + j is position j of token t.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

NO_ROUTE = -1  # in the place of an expert, where records of routes have none for a token in a layer


def sort_slots(ids: torch.Tensor, coefficients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's slots by descending coefficient, ties to the lower expert id.

    ids: integer [T, k]; coefficients: float [T, k]. Returns both in that order; coefficients stay differentiable.
    Specs that sum "in slot order" mean this one: `torch.topk` leaves the order of equal values open.
    """
    by_id = ids.argsort(dim=-1)
    by_coefficient = coefficients.detach().gather(1, by_id).argsort(dim=-1, descending=True, stable=True)
    order = by_id.gather(1, by_coefficient)
    return ids.gather(1, order), coefficients.gather(1, order)


@dataclass(frozen=True, eq=False)
class Routing:
    """The permutation that groups slots by expert.

    order: int64 [T*k], the slot number of each grouped row; within an expert, in ascending order
    experts: int64 [T*k], the expert of each grouped row
    offsets: E + 1 row numbers; expert e owns the grouped rows offsets[e] to offsets[e + 1]
    """

    order: torch.Tensor
    experts: torch.Tensor
    offsets: tuple[int, ...]
    top_k: int

    @classmethod
    def group(cls, topk_ids: torch.Tensor, num_experts: int) -> Routing:
        """topk_ids: integer [T, k]. Raises ValueError when an id is not in [0, num_experts)."""
        flat = topk_ids.flatten().long()
        if flat.numel() and not (int(flat.min()) >= 0 and int(flat.max()) < num_experts):
            found = f"[{int(flat.min())}, {int(flat.max())}]"
            raise ValueError(f"expert ids must be in [0, {num_experts}), got values in {found}")
        counts = torch.bincount(flat, minlength=num_experts)
        offsets = [0, *counts.cumsum(0).tolist()]
        experts, order = torch.sort(flat, stable=True)
        return cls(order, experts, tuple(offsets), topk_ids.shape[1])

    @property
    def tokens(self) -> torch.Tensor:
        """int64 [T*k]: the token of each grouped row."""
        return self.order // self.top_k

    def occupied(self) -> list[tuple[int, slice]]:
        """(expert, its grouped rows) for every expert that has any."""
        bounds = zip(self.offsets, self.offsets[1:], strict=False)
        return [(expert, slice(a, b)) for expert, (a, b) in enumerate(bounds) if a < b]

    def by_token(self, grouped: torch.Tensor) -> torch.Tensor:
        """Grouped rows [T*k, N] -> [T, k, N]."""
        slots = torch.empty_like(grouped)
        slots[self.order] = grouped
        return slots.view(-1, self.top_k, grouped.shape[-1])

    def expert_order(self) -> torch.Tensor:
        """int64 [T, k]: each token's positions in ascending order of their experts."""
        return self.by_token(self.experts[:, None]).squeeze(-1).argsort(dim=-1, stable=True)
