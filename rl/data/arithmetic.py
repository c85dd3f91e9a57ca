"""The tiny task: ``07+45=`` over a vocabulary of characters, small enough to be learned on a laptop."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from rl.data.addition_pairs import AdditionPairs
from rl.data.character_tokenizer import character_tokenizer
from rl.data.problem import Problem, content_hash

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ALPHABET = "0123456789+="


class Arithmetic:
    """Sums a + b with 0 <= a, b < bound.

    Summands and answers are zero-padded to the width of the largest one. With `reversed_digits` the answer
    begins with its least significant digit, the order in which carries arise (Lee et al. 2023, "Teaching
    Arithmetic to Small Transformers", arXiv 2307.03381): ``07+45=`` has the answer 250 (that is 052).

    Raises DataError for a bound or a number of held-out problems that cannot be.
    """

    def __init__(self, bound: int, reversed_digits: bool, held_out: int, seed: int):
        self._pairs = AdditionPairs(0, bound, held_out, seed)
        self._bound, self._reversed, self._seed = bound, reversed_digits, seed
        self._operand_width = len(str(bound - 1))
        self._answer_width = len(str(2 * (bound - 1)))
        self.training_count = len(self._pairs)
        self.held_out = tuple(self._problem(a, b) for a, b in self._pairs.held_out)

    def training(self, position: int) -> Problem:
        return self._problem(*self._pairs.drawn(position))

    def demonstrations(self, position: int, correct_share: float) -> tuple[str, str]:
        """Prompt and answer for a supervised start, a pure function of the seed and of `position`.

        The prompt is that of ``training(position)``. The answer is right with probability `correct_share` and
        otherwise drawn evenly from the wrong sums 0 ... 2 (bound - 1), in the right format.
        """
        problem = self.training(position)
        draw = random.Random(f"{self._seed}/demonstration/{position}")
        if draw.random() < correct_share:
            return str(problem.prompt), problem.answer
        a, b = self._pairs.drawn(position)
        wrong = draw.randrange(2 * (self._bound - 1))
        return str(problem.prompt), self.format_answer(wrong + (wrong >= a + b))

    def format_answer(self, total: int) -> str:
        """`total` as a response must write it."""
        digits = f"{total:0{self._answer_width}}"
        return digits[::-1] if self._reversed else digits

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """One token a character; see `rl.data.character_tokenizer`."""
        return character_tokenizer(ALPHABET)

    def describe(self) -> dict[str, str | int | bool | None]:
        training = (self._problem(a, b) for a, b in self._pairs.ascending())
        return {
            "source": "arithmetic",
            "bound": self._bound,
            "reversed_digits": self._reversed,
            "training": self.training_count,
            "held_out": len(self.held_out),
            "content_hash": content_hash(training, self.held_out),
        }

    def _problem(self, a: int, b: int) -> Problem:
        width = self._operand_width
        return Problem(f"{a}+{b}", f"{a:0{width}}+{b:0{width}}=", self.format_answer(a + b), "arithmetic")
