"""Verifiable instructions (IFEval, Zhou et al. 2023, arXiv 2311.07911), checked by lm-eval's checkers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from rl.data.problem import Problem
from rl.rewards.extraction import without_reasoning
from rl.rewards.ifeval_checkers import checkers, fixed_draws
from rl.rewards.score import Score

INSTRUCTIONS, ARGUMENTS = "instruction_id_list", "kwargs"  # the columns that make a problem's answer

_CHECKERS = checkers()  # found missing when the reward is loaded, not when the first response is scored


@dataclass(frozen=True)
class Verdicts:
    """Whether each instruction of a prompt was followed, by the response as it is and by the best of eight
    variants of it (without its first line, its last line, asterisks)."""

    strict: tuple[bool, ...]
    loose: tuple[bool, ...]


def follows_instructions(response: str, problem: Problem) -> Score:
    """1 when every instruction is followed strictly, else 0; what `verdicts` raises.

    details: instructions (how many the prompt gives), strict and loose (how many of them were followed).
    """
    found = verdicts(response, problem)
    details = {
        "instructions": float(len(found.strict)),
        "strict": float(sum(found.strict)),
        "loose": float(sum(found.loose)),
    }
    followed = all(found.strict)
    return Score(float(followed), followed, details=details)


def verdicts(response: str, problem: Problem) -> Verdicts:
    """Check `response`, without its reasoning part, against the instructions in the problem's answer.

    The answer is a JSON object of IFEval's columns instruction_id_list and kwargs. An empty response follows no
    instruction. Raises ValueError for instructions that are unknown or lack arguments: for these the checkers would
    draw some at random.
    """
    task = _task(problem)
    answer = without_reasoning(response)
    with fixed_draws():
        strict = _CHECKERS.test_instruction_following_strict(task, answer)
    with fixed_draws():
        loose = _CHECKERS.test_instruction_following_loose(task, answer)
    return Verdicts(tuple(strict.follow_instruction_list), tuple(loose.follow_instruction_list))


def _task(problem: Problem) -> Any:
    """The problem as the checkers take it."""
    answer = json.loads(problem.answer)
    names, arguments = answer[INSTRUCTIONS], answer[ARGUMENTS]
    if not names or len(names) != len(arguments):
        raise ValueError(
            f"problem {problem.id!r} has {len(names)} instructions and {len(arguments)} sets of arguments"
        )
    for name, given in zip(names, arguments, strict=True):
        _check_arguments(problem.id, name, given)
    prompt = problem.prompt if isinstance(problem.prompt, str) else problem.prompt[-1].content
    return _CHECKERS.InputExample(key=problem.id, instruction_id_list=names, prompt=prompt, kwargs=arguments)


def _check_arguments(identifier: str, name: str, given: dict[str, Any]) -> None:
    known = _CHECKERS.instructions_registry.INSTRUCTION_DICT
    if name not in known:
        raise ValueError(f"problem {identifier!r}: no instruction is called {name!r}")
    usable = {key: value for key, value in given.items() if value}  # the checkers take 0 and "" for absent
    instruction = known[name](name)
    try:
        with fixed_draws():
            instruction.build_description(**usable)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"problem {identifier!r}: instruction {name} cannot take {given}: {error}"
        ) from error
    needed = sorted(instruction.get_instruction_args_keys())
    if sorted(usable) != needed:
        raise ValueError(
            f"problem {identifier!r}: instruction {name} needs {needed} (not 0, not empty), got {given}"
        )
