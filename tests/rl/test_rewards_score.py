from __future__ import annotations

import math
import pickle

import pytest

from rl.data.problem import Problem
from rl.errors import ConfigError
from rl.rewards.registry import load_reward
from rl.rewards.score import Score

PROBLEM = Problem("p", "07+45=", "250", "test")
CUSTOM = "tests.rl.custom_rewards"


def test_a_failed_score_is_neither_right_nor_worth_anything():
    failed = Score.failed("no verdict")
    assert (failed.value, failed.correct, failed.error) == (0.0, False, "no verdict")
    assert failed != Score.of(False)
    assert pickle.loads(pickle.dumps(failed)) == failed


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_is_finite(value):
    with pytest.raises(ValueError, match=r"Score\.value"):
        Score(value, correct=False)


@pytest.mark.parametrize("arguments", [(1.0, False, "e"), (0.0, True, "e"), (0.0, False, "")])
def test_an_error_comes_with_no_other_verdict(arguments):
    with pytest.raises(ValueError, match="a score with an error"):
        Score(*arguments)


@pytest.mark.parametrize(
    "response, correct",
    [
        ("250", True),
        (" 250\n", True),
        ("052", False),
        ("25", False),
        ("2500", False),
        ("250.", False),
        ("", False),
    ],
)
def test_arithmetic_is_an_exact_match(response, correct):
    assert load_reward("arithmetic")(response, PROBLEM) == Score(float(correct), correct)


def test_only_arithmetic_is_cheap_enough_to_run_inline():
    assert load_reward("arithmetic").inline
    assert not load_reward("math", "boxed").inline
    assert not load_reward(f"{CUSTOM}:by_order").inline


def test_a_reward_by_import_path():
    assert load_reward(f"{CUSTOM}:by_order")("score 0.25", PROBLEM) == Score(0.25, correct=False)


def test_what_a_reward_raises_is_an_error_of_the_sample():
    score = load_reward(f"{CUSTOM}:by_order")("raise " + "x" * 10_000, PROBLEM)
    assert score.error is not None
    assert score.error.startswith("RuntimeError: xxx")
    assert len(score.error) == 500
    assert (
        load_reward(f"{CUSTOM}:by_order")("score nan", PROBLEM).error
        == "ValueError: Score.value=nan: must be finite"
    )


def test_a_reward_that_returns_something_else_is_refused():
    with pytest.raises(
        ConfigError, match=r"'tests\.rl\.custom_rewards:no_score' returned 1\.0 for problem 'p'"
    ):
        load_reward(f"{CUSTOM}:no_score")("", PROBLEM)


@pytest.mark.parametrize(
    "function, parser, message",
    [
        ("aritmetic", None, r"reward\.function='aritmetic': not one of arithmetic, math, ifeval"),
        (
            "foo.bar:baz",
            None,
            r"reward\.function='foo\.bar:baz': importing foo\.bar failed.*No module named 'foo'",
        ),
        (f"{CUSTOM}:missing", None, r"has no function missing"),
        (f"{CUSTOM}:not_a_function", None, r"has no function not_a_function"),
        (f"{CUSTOM}:", None, "package.module:function"),
        (f"{CUSTOM}:one_argument", None, r"must be callable with \(response, problem\)"),
        ("math", None, r"reward\.parser=None.*boxed, answer_line, answer_line_or_boxed, last_number, gsm8k"),
        ("math", "box", r"reward\.parser='box'"),
        ("arithmetic", "boxed", r"reward\.parser='boxed': reward\.function=arithmetic has no use"),
        (f"{CUSTOM}:by_order", "boxed", r"has no use for a parser"),
        ("ifeval", "boxed", r"reward\.parser='boxed': reward\.function=ifeval has no use"),
    ],
)
def test_wrong_names_are_refused_with_key_value_and_rule(function, parser, message):
    with pytest.raises(ConfigError, match=message):
        load_reward(function, parser)


def test_a_wrong_answer_may_cost_something_and_an_error_never_does():
    reward = load_reward("arithmetic", wrong=-1.0)
    assert reward("250", PROBLEM) == Score(1.0, True)
    assert reward("251", PROBLEM) == Score(-1.0, False)
    broken = load_reward("math", "boxed", wrong=-1.0)(r"\boxed{1}", Problem("p", "q", "$ $", "test"))
    assert (broken.value, broken.correct) == (0.0, False)
    assert broken.error


def test_a_function_of_ones_own_has_values_of_its_own():
    with pytest.raises(ConfigError, match=r"reward\.wrong=-1\.0: .*by_order gives values of its own"):
        load_reward(f"{CUSTOM}:by_order", wrong=-1.0)


def test_details_come_with_a_score_and_change_nothing():
    detailed = Score(1.0, True, details={"instructions": 2.0})
    assert pickle.loads(pickle.dumps(detailed)) == detailed
    assert Score.of(True).details == {}
