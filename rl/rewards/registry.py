"""Rewards by name: those built in, and any function by its import path."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

from rl.data.problem import Problem
from rl.errors import ConfigError
from rl.rewards.extraction import PARSERS
from rl.rewards.score import RewardFunction, Score

_MAX_ERROR_CHARS = 500


@dataclass(frozen=True)
class _BuiltIn:
    path: str
    inline: bool
    parses: bool


BUILT_IN = {
    "arithmetic": _BuiltIn("rl.rewards.arithmetic:exact_match", inline=True, parses=False),
    "math": _BuiltIn("rl.rewards.math:verify_answer", inline=False, parses=True),
    "ifeval": _BuiltIn("rl.rewards.ifeval:follows_instructions", inline=False, parses=False),
}


@dataclass(frozen=True)
class Reward:
    """A reward function that has been looked up.

    name, parser, wrong: what `load_reward` was given.
    inline: cheap and certain to end, so that it needs no process of its own.
    """

    name: str
    parser: str | None
    inline: bool
    function: RewardFunction
    wrong: float = 0.0

    def __call__(self, response: str, problem: Problem) -> Score:
        """The function's score, or a score with an error if it raised.

        Raises ConfigError when it returns something else than a `Score`.
        """
        try:
            score: object = self.function(response, problem)
        except Exception as error:
            return Score.failed(f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARS])
        if not isinstance(score, Score):
            raise ConfigError(
                f"reward.function={self.name!r} returned {score!r} for problem {problem.id!r};"
                " a reward must return rl.rewards.score.Score"
            )
        return score if score.correct or score.error or not self.wrong else replace(score, value=self.wrong)


def load_reward(function: str, parser: str | None = None, wrong: float = 0.0) -> Reward:
    """The reward called `function`: a built-in name, or ``package.module:function`` for any other.

    `parser` names the rule in `rl.rewards.extraction` that finds the final answer, for rewards that need one.
    `wrong` is what a wrong answer is worth, where a right one is worth 1; for the built-in rewards.

    Raises ConfigError for an unknown name, a function that cannot be imported or called with (response,
    problem), a parser that is missing, unknown or not needed, and `wrong` for a function that gives its own values.
    """
    built_in = BUILT_IN.get(function)
    if built_in and built_in.parses and parser not in PARSERS:
        raise ConfigError(
            f"reward.parser={parser!r}: reward.function={function} needs one of {', '.join(PARSERS)}"
        )
    if parser is not None and not (built_in and built_in.parses):
        raise ConfigError(f"reward.parser={parser!r}: reward.function={function} has no use for a parser")
    if built_in is None:
        if wrong:
            raise ConfigError(f"reward.wrong={wrong}: reward.function={function} gives values of its own")
        return Reward(function, None, inline=False, function=_imported(function))
    found = _imported(built_in.path)
    chosen = partial(found, parser=parser) if parser else found
    return Reward(function, parser, built_in.inline, chosen, wrong)


def _imported(path: str) -> Any:
    key = f"reward.function={path!r}"
    module_name, colon, attribute = path.partition(":")
    if not (module_name and colon and attribute):
        raise ConfigError(f"{key}: not one of {', '.join(BUILT_IN)}, nor of the form package.module:function")
    try:
        module = import_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"{key}: importing {module_name} failed: {type(error).__name__}: {error}"
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ConfigError(f"{key}: module {module_name} has no function {attribute}")
    try:
        inspect.signature(function).bind("", None)
    except TypeError as error:
        if path not in {entry.path for entry in BUILT_IN.values()}:
            raise ConfigError(f"{key}: must be callable with (response, problem): {error}") from error
    return function
