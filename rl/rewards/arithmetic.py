"""Exact match, for tasks with one way to write each answer."""

from __future__ import annotations

from rl.data.problem import Problem
from rl.rewards.score import Score


def exact_match(response: str, problem: Problem) -> Score:
    """1 when the response is the answer, character by character; white space around it does not count."""
    return Score.of(response.strip() == problem.answer)
