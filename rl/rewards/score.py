"""The result of scoring one response. Standard library only: reward workers import this file."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rl.data.problem import Problem


@dataclass(frozen=True)
class Score:
    """What one response is worth.

    value: the reward.
    correct: whether the answer is right; accuracy counts these, whatever the values are.
    error: why the response could not be judged, else None. A failed verifier is not a wrong answer: such a
        score has value 0 and correct False, and must be counted apart.
    details: further numbers about the response, by name, for reports; nothing is trained on them.

    Raises ValueError for a value that is not finite and for an error that comes with another verdict.
    """

    value: float
    correct: bool
    error: str | None = None
    details: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise ValueError(f"Score.value={self.value}: must be finite")
        if self.error is not None and (self.value != 0 or self.correct or not self.error):
            raise ValueError(f"{self}: a score with an error has a message, value 0 and correct False")

    @classmethod
    def of(cls, correct: bool) -> Score:
        """1 for a right answer, 0 for a wrong one."""
        return cls(float(correct), correct)

    @classmethod
    def failed(cls, error: str) -> Score:
        """The response could not be judged."""
        return cls(0.0, False, error)


RewardFunction = Callable[[str, Problem], Score]
