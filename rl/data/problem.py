"""What a data set is made of, and what every source of problems offers.

Standard library only: reward workers import this file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Message:
    """One message of a chat."""

    role: str
    content: str


@dataclass(frozen=True)
class Problem:
    """A question with its known answer.

    `prompt` is plain text, or the messages of a chat to which the answer is the next message. `source` names
    the data set.
    """

    id: str
    prompt: str | tuple[Message, ...]
    answer: str
    source: str


class ProblemSource(Protocol):
    """Problems for training, in an endless order, and problems held out from it.

    The order is a pure function of the source's seed, so the data cursor of a run is one integer: a run that
    was resumed, and another run with the same seed, see the same problems.
    """

    @property
    def training_count(self) -> int:
        """Training problems. Positions 0 to training_count - 1, the first epoch, draw each of them once."""
        ...

    def training(self, position: int) -> Problem:
        """The problem drawn at `position` (0, 1, ...), however many epochs that is; each is shuffled anew.

        Raises ValueError when `position` is negative.
        """
        ...

    @property
    def held_out(self) -> tuple[Problem, ...]:
        """Problems that training never draws."""
        ...

    def describe(self) -> dict[str, str | int | bool | None]:
        """Settings, counts (training, held_out) and content_hash, for the record of a run."""
        ...


def content_hash(training: Iterable[Problem], held_out: Iterable[Problem]) -> str:
    """First 16 hexadecimal digits of SHA-256 over the problems in the given order (not the shuffled one)."""
    digest = hashlib.sha256()
    for part in (training, held_out):
        for problem in part:
            digest.update(repr(problem).encode())
        digest.update(b"\n")
    return digest.hexdigest()[:16]
