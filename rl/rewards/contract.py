"""The contract of a reward function, and a test of it for functions of one's own.

A reward is a function of (response, `rl.data.problem.Problem`) that a fresh process can import as
``package.module:function``. It returns an `rl.rewards.score.Score`, the same one for the same arguments, whatever was
scored before; it judges any text within the time limit, however odd, and raises for nothing but a problem that it
cannot use.

In a test suite:

    from rl.rewards.contract import Example, check_contract

    def test_my_reward():
        check_contract("my.rewards:length", [Example("a right answer", problem, correct=True)])
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rl.data.problem import Problem
from rl.errors import ConfigError
from rl.rewards.pool import RewardPool
from rl.rewards.registry import load_reward
from rl.rewards.score import Score

ODD_RESPONSES = {
    "empty": "",
    "white space": " \n\t",
    "NUL": "\0",
    "half a surrogate pair": "\ud83d",
    "right to left, combined, wide": "\u202e\u0645e\u0301\uff13\U0001f600",
    "long": "so " * 50_000,
    "digits": "9" * 20_000,
    "open braces": "{" * 5_000 + r"\boxed{" * 1_000,
    "the template": "The last line is of the form Answer: $Answer",
    "format characters": "%s {0} \\N{DASH} \\x",
}


class ContractViolation(AssertionError):
    """What a reward function does that it must not; one line for each finding."""


@dataclass(frozen=True)
class Example:
    """A response, its problem, and whether it is right (None: no matter)."""

    response: str
    problem: Problem
    correct: bool | None = None


def check_contract(
    function: str, examples: Sequence[Example], *, parser: str | None = None, timeout_s: float = 10.0
) -> list[Score]:
    """Score the examples, and odd responses to their problems, in processes as a run does.

    Returns the scores of the examples. Raises ContractViolation with all findings, and ValueError without examples.
    """
    if not examples:
        raise ValueError("a contract test needs at least one example")
    odd = [(name, (text, e.problem)) for e in examples[:1] for name, text in ODD_RESPONSES.items()]
    samples = [(example.response, example.problem) for example in examples]
    try:
        with RewardPool(load_reward(function, parser), workers=1, timeout_s=timeout_s) as pool:
            first, of_odd = pool.score(samples), pool.score([sample for _, sample in odd])
        with RewardPool(load_reward(function, parser), workers=1, timeout_s=timeout_s) as pool:
            again = pool.score(samples[::-1])[::-1]
    except ConfigError as error:
        raise ContractViolation(str(error)) from error
    findings = [
        *_about_examples(examples, first, again),
        *(
            f"response {name!r}: {score.error}"
            for (name, _), score in zip(odd, of_odd, strict=True)
            if score.error
        ),
    ]
    if findings:
        raise ContractViolation(f"{function} breaks the contract of rewards:\n" + "\n".join(findings))
    return first


def _about_examples(
    examples: Sequence[Example], first: Sequence[Score], again: Sequence[Score]
) -> Iterator[str]:
    for number, (example, score, second) in enumerate(zip(examples, first, again, strict=True)):
        if score.error is not None:
            yield f"example {number}: {score.error}"
        elif score != second:
            yield f"example {number}: {score} at first, {second} in another process and order"
        elif example.correct not in (None, score.correct):
            yield f"example {number}: correct={score.correct}, expected {example.correct}"
