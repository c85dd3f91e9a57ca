"""Groups of responses for tests, without an engine."""

from __future__ import annotations

from rl.data.problem import Problem
from rl.data.prompts import Prompt
from rl.rewards.score import Score
from rl.rollout import Group, Rollout
from sampler.engine import Completion

PROMPT = (5, 6)


def rollout(
    value: float, length: int = 3, truncated: bool = False, logp: float = -0.5, version: int = 1
) -> Rollout:
    """A response of `length` tokens with that raw reward, right from 1."""
    reason = "length" if truncated else "stop"
    completion = Completion(tuple(range(7, 7 + length)), (logp,) * length, reason, (version,) * length)
    return Rollout(completion, Score(value, correct=value >= 1))


def group(*rollouts: Rollout, position: int = 0) -> Group:
    return Group(Prompt(position, Problem(str(position), "q", "a", "s"), PROMPT), rollouts)
