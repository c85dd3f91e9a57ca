"""Values that are not finite and reach a quantiser: counted on the device, refused later.

A check at every quantisation would make the host wait for the device each time. A guard lets the computation go on,
whose results are then meaningless; whoever uses them calls `check` first, once a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

import torch


class Operand(StrEnum):
    FC1_INPUT = "FC1 input"
    FC2_INPUT = "FC2 input"
    GRADIENT = "operands of the gradient"


_INDEX = {operand: index for index, operand in enumerate(Operand)}


class NonFiniteGuard:
    """Counts, for one layer, the rows that hold values that are not finite, by operand and expert.

    first_expert: the number, in messages, of expert 0, where others own those before.
    """

    def __init__(self, layer: int, num_experts: int, first_expert: int = 0) -> None:
        self.layer = layer
        self.num_experts = num_experts
        self.first_expert = first_expert
        self._counts: torch.Tensor | None = None  # int64 [operands, E], on the device of the first rows

    def record(self, operand: Operand, bad_rows: torch.Tensor, experts: torch.Tensor | int) -> None:
        """bad_rows: bool [R]; experts: int64 [R], the expert of each row, or one for all. Does not wait for the
        device.
        """
        own = self._all(bad_rows.device)[_INDEX[operand]]
        if isinstance(experts, int):
            own[experts] += bad_rows.sum()
        else:
            own.index_add_(0, experts, bad_rows.long())

    def input_counts(self, device: torch.device) -> torch.Tensor:
        """int64 [2, E] on the device, the counts of FC1's and FC2's inputs: for kernels, to add to."""
        return self._all(device)[:2]

    def check(self) -> None:
        """Wait for the device. Raises ValueError when anything was counted; counting starts again at zero."""
        check_guards([self])

    def clear(self) -> None:
        """Forget what was counted."""
        if self._counts is not None:
            self._counts.zero_()

    def _all(self, device: torch.device) -> torch.Tensor:
        if self._counts is None:
            with torch.inference_mode(False):  # outside of which it will be cleared
                self._counts = torch.zeros(len(Operand), self.num_experts, dtype=torch.int64, device=device)
        return self._counts

    def _describe(self, counts: list[list[int]]) -> str:
        parts = []
        for operand, per_expert in zip(Operand, counts, strict=True):
            numbered = enumerate(per_expert, self.first_expert)
            experts = [f"{expert} ({count} rows)" for expert, count in numbered if count]
            if experts:
                parts.append(f"{operand} of expert {', '.join(experts)}")
        return f"layer {self.layer}: {'; '.join(parts)}"


def check_guards(guards: Iterable[NonFiniteGuard]) -> None:
    """`NonFiniteGuard.check` of many layers at once, with one transfer from the device.

    Raises ValueError naming every layer, operand and expert; all guards start again at zero, then too.
    """
    used = {guard: guard._counts for guard in guards if guard._counts is not None}
    if not used:
        return
    on_host = torch.cat([counts.flatten() for counts in used.values()]).cpu()
    if not on_host.any():
        return
    per_guard = on_host.split([counts.numel() for counts in used.values()])
    problems = []
    for guard, own in zip(used, per_guard, strict=True):
        guard.clear()
        if own.any():
            problems.append(guard._describe(own.view(len(Operand), -1).tolist()))
    raise ValueError("values that are not finite reached a quantiser: " + " | ".join(problems))
