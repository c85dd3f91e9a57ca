"""Pairs of summands, split into training and held-out pairs so that no sum is known from its mirror image."""

from __future__ import annotations

import numpy as np

from rl.data.order import Order, held_out_order
from rl.errors import DataError

MAX_OPERANDS = 1000  # a million pairs; their order is held in memory


class AdditionPairs:
    """Ordered pairs (a, b) with low <= a, b < high.

    `held_out` pairs are drawn by seed; for each of them neither (a, b) nor (b, a) is trained on, and only
    one of the two is held out.

    Raises DataError unless there are 2 to MAX_OPERANDS numbers and some pairs are left to train on.
    """

    def __init__(self, low: int, high: int, held_out: int, seed: int):
        operands = high - low
        if not 2 <= operands <= MAX_OPERANDS:
            raise DataError(
                f"summands from {low} to {high - 1}: there must be 2 to {MAX_OPERANDS} different numbers"
            )
        sums = operands * (operands + 1) // 2
        if not 0 <= held_out < sums:
            raise DataError(
                f"data.held_out={held_out}: must be 0 or more and less than {sums}, the number of unordered"
                f" pairs of summands from {low} to {high - 1}"
            )
        trained = np.ones((operands, operands), dtype=bool)
        chosen: list[tuple[int, int]] = []
        for pair in held_out_order(operands**2, seed):
            if len(chosen) == held_out:
                break
            a, b = divmod(int(pair), operands)
            if trained[a, b]:
                trained[a, b] = trained[b, a] = False
                chosen.append((low + a, low + b))

        self.held_out = tuple(chosen)
        self._low, self._operands = low, operands
        self._training = np.flatnonzero(trained)
        self._order = Order(len(self._training), seed)

    def __len__(self) -> int:
        """Training pairs."""
        return len(self._training)

    def drawn(self, position: int) -> tuple[int, int]:
        """The training pair drawn at `position`, in the sense of `rl.data.problem.ProblemSource`."""
        return self._pair(self._order[position])

    def ascending(self) -> list[tuple[int, int]]:
        """Every training pair once."""
        return [self._pair(index) for index in range(len(self))]

    def _pair(self, index: int) -> tuple[int, int]:
        a, b = divmod(int(self._training[index]), self._operands)
        return self._low + a, self._low + b
