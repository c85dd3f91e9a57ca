"""Dynamic sampling: which groups of responses are learned from, and how many more are needed.

DAPO (Yu et al. 2025, arXiv 2503.14476, section 3.2) leaves out prompts whose responses all have the same
outcome, because their advantages are zero, and samples others until the batch is full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

from rl.errors import UserError
from rl.rewards.score import Score


class TooFewGroups(UserError):
    """The rounds of dynamic sampling are used up and the batch is not full."""


class AllSolved(TooFewGroups):
    """The same, because every dropped group has only right answers: the problems have nothing left to teach."""


class ScoredGroup(Protocol):
    """The responses to one prompt; only their scores matter here."""

    @property
    def scores(self) -> Sequence[Score]: ...


G = TypeVar("G", bound=ScoredGroup)


class Verdict(StrEnum):
    """What becomes of a group, and why."""

    MIXED = "mixed"  # outcomes differ: there is something to learn
    SOLVED = "solved"  # all the same, and all right
    UNSOLVED = "unsolved"  # all the same, and not all right
    FAILED = "failed"  # a response could not be judged: the group is dropped whole


def judge(scores: Sequence[Score]) -> Verdict:
    """The verdict on one group. Raw rewards are compared exactly: no standard deviation, no tolerance."""
    if any(score.error is not None for score in scores):
        return Verdict.FAILED
    values = [score.value for score in scores]
    if min(values) != max(values):
        return Verdict.MIXED
    return Verdict.SOLVED if all(score.correct for score in scores) else Verdict.UNSOLVED


@dataclass(kw_only=True)
class GroupBuffer(Generic[G]):
    """Collects groups, round by round, until `needed` are kept or the rounds are used up.

    Groups are kept in the order in which they are added; those of the last round beyond `needed` are the surplus.
    The fields are the whole state: a buffer made from them goes on where the other stopped. One that is made with
    groups that waited for a batch takes a round all the same, be they enough or not.

    needed: groups of the batch. at_least: with how many it can do once the rounds are used up (a policy that
        solves almost everything leaves few mixed groups). group_size: responses of each. max_rounds: calls of
        `add` at most.
    dynamic_sampling: False keeps groups whose outcomes are all the same, too; groups with a failed response
        are dropped even so.

    Raises ValueError when a number is less than 1 or `at_least` is more than `needed`.
    """

    needed: int
    at_least: int
    group_size: int
    max_rounds: int
    dynamic_sampling: bool = True
    kept: list[G] = field(default_factory=list)
    drawn: int = 0
    rounds: int = 0
    solved: int = 0
    unsolved: int = 0
    failed: int = 0
    surplus: list[G] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("needed", "at_least", "group_size", "max_rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.at_least > self.needed:
            raise ValueError(f"at_least={self.at_least}: must not be more than needed={self.needed}")

    @property
    def missing(self) -> int:
        """Groups still needed."""
        return self.needed - len(self.kept)

    @property
    def complete(self) -> bool:
        """No further round is needed, or none is left and `at_least` groups are there."""
        return not self.missing or (self.rounds >= self.max_rounds and len(self.kept) >= self.at_least)

    def add(self, groups: Sequence[G]) -> None:
        """Judge the groups of one round and keep those that count.

        Raises:
            TooFewGroups: this was the last round and fewer than `at_least` groups are kept; AllSolved when all
                others were solved.
            ValueError: the buffer is complete after a round, or a group has not `group_size` scores.
        """
        if self.rounds and self.complete:
            raise ValueError(f"{len(self.kept)} groups are there: another round is not needed")
        for number, group in enumerate(groups):
            if len(group.scores) != self.group_size:
                raise ValueError(
                    f"group {number} has {len(group.scores)} scores, and group_size is {self.group_size}"
                )
        self.rounds += 1
        for group in groups:
            self._place(group)
        if self.rounds >= self.max_rounds and not self.complete:
            error = TooFewGroups if self.unsolved or self.failed else AllSolved
            raise error(
                f"{len(self.kept)} groups kept, {self.at_least} needed, after {self.rounds} rounds"
                f" ({self.drawn} drawn: {self.solved} with only right answers, {self.unsolved} with only"
                f" wrong ones, {self.failed} with a failed reward); raise algorithm.max_rounds, use problems"
                " nearer to what the model can do, or set algorithm.dynamic_sampling=false"
            )

    def _place(self, group: G) -> None:
        self.drawn += 1
        verdict = judge(group.scores)
        if verdict is Verdict.MIXED or not (self.dynamic_sampling or verdict is Verdict.FAILED):
            (self.kept if self.missing else self.surplus).append(group)
        elif verdict is Verdict.SOLVED:
            self.solved += 1
        elif verdict is Verdict.UNSOLVED:
            self.unsolved += 1
        else:
            self.failed += 1

    def metrics(self) -> dict[str, float]:
        """Counts so far: drawn = kept + dropped_constant + dropped_error + surplus, without what waited before."""
        return {
            "groups/kept": len(self.kept),
            "groups/drawn": self.drawn,
            "groups/rounds": self.rounds,
            "groups/dropped_constant": self.solved + self.unsolved,
            "groups/dropped_error": self.failed,
        }
