"""Token slots grouped by the expert that computes them.

A slot is a (token, position in its top-k list) pair; slot number t*k + j is position j of token t.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class Routing:
    """The permutation that groups slots by expert.

    order: int64 [T*k], the slot number of each grouped row; within an expert, in ascending order
    offsets: E + 1 row numbers; expert e owns the grouped rows offsets[e] to offsets[e + 1]
    """

    order: torch.Tensor
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
        return cls(torch.argsort(flat, stable=True), tuple(offsets), topk_ids.shape[1])

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


def sum_in_slot_order(slots: torch.Tensor, coefficients: torch.Tensor | None = None) -> torch.Tensor:
    """[T, k, N] with float32 [T, k] -> float32 [T, N]: (c0*y0 + c1*y1) + ..., each step rounded to FP32."""
    total: torch.Tensor | None = None
    for position in range(slots.shape[1]):
        term = slots[:, position].float()
        if coefficients is not None:
            term = coefficients[:, position, None] * term
        total = term if total is None else total + term
    assert total is not None
    return total
