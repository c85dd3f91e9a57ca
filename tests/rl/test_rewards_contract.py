from __future__ import annotations

import pytest

from rl.data.problem import Problem
from rl.rewards.contract import ContractViolation, Example, check_contract
from rl.rewards.score import Score

CUSTOM = "tests.rl.custom_rewards"
PROBLEM = Problem("p", "q", "34", "test")
RIGHT, WRONG = Example("34", PROBLEM, correct=True), Example("35", PROBLEM, correct=False)


def test_a_good_reward_passes_and_its_scores_come_back():
    assert check_contract("arithmetic", [RIGHT, WRONG]) == [Score.of(True), Score.of(False)]


@pytest.mark.parametrize("parser", ["answer_line_or_boxed", "last_number"])
def test_the_rewards_that_come_with_the_project_keep_it(parser):
    check_contract("math", [Example("no number", PROBLEM, correct=False)], parser=parser, timeout_s=30)


@pytest.mark.parametrize(
    "function, example, message",
    [
        ("no_score", RIGHT, r"returned 1\.0 for problem 'p'"),
        ("one_argument", RIGHT, r"callable with \(response, problem\)"),
        ("missing", RIGHT, "has no function missing"),
        ("forgetful", RIGHT, r"example 0: .* at first, .* in another process and order"),
        ("by_order", Example("sleep 9", PROBLEM), "example 0: no verdict within 2 s"),
        (
            "by_order",
            Example("exit 3", PROBLEM),
            r"example 0: the process of the reward died \(exit status 3\)",
        ),
        ("by_order", Example("raise no", PROBLEM), "example 0: RuntimeError: no"),
        ("by_order", Example("score 34", PROBLEM, correct=False), "example 0: correct=True, expected False"),
        ("ascii_only", RIGHT, r"response 'right to left, combined, wide': UnicodeEncodeError"),
    ],
)
def test_every_breach_is_found(function, example, message):
    with pytest.raises(ContractViolation, match=message):
        check_contract(f"{CUSTOM}:{function}", [example], timeout_s=2)


def test_all_findings_are_named():
    with pytest.raises(ContractViolation) as violation:
        check_contract(f"{CUSTOM}:by_order", [Example("raise a", PROBLEM), RIGHT, Example("exit 3", PROBLEM)])
    assert [line.split(":")[0] for line in str(violation.value).splitlines()[1:]] == [
        "example 0",
        "example 1",
        "example 2",
    ]


def test_a_test_without_examples_is_none():
    with pytest.raises(ValueError, match="at least one example"):
        check_contract("arithmetic", [])
