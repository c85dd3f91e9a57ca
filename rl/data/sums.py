"""Sums asked in words, as a chat: a first task for a small pretrained model."""

from __future__ import annotations

from rl.data.addition_pairs import AdditionPairs
from rl.data.problem import Message, Problem, content_hash
from rl.errors import DataError


class Sums:
    """``Compute a + b. Answer with only the number.`` with summands of exactly `digits` decimal digits.

    One digit means 0 to 9, two digits 10 to 99. Raises DataError for digits or a number of held-out problems
    that cannot be.
    """

    def __init__(self, digits: int, held_out: int, seed: int):
        if not 1 <= digits <= 3:
            raise DataError(f"data.digits={digits}: must be 1, 2 or 3")
        low = 0 if digits == 1 else 10 ** (digits - 1)
        self._pairs = AdditionPairs(low, 10**digits, held_out, seed)
        self._digits = digits
        self.training_count = len(self._pairs)
        self.held_out = tuple(self._problem(a, b) for a, b in self._pairs.held_out)

    def training(self, position: int) -> Problem:
        return self._problem(*self._pairs.drawn(position))

    def describe(self) -> dict[str, str | int | bool | None]:
        training = (self._problem(a, b) for a, b in self._pairs.ascending())
        return {
            "source": "sums",
            "digits": self._digits,
            "training": self.training_count,
            "held_out": len(self.held_out),
            "content_hash": content_hash(training, self.held_out),
        }

    def _problem(self, a: int, b: int) -> Problem:
        question = Message("user", f"Compute {a} + {b}. Answer with only the number.")
        return Problem(f"{a}+{b}", (question,), str(a + b), "sums")
