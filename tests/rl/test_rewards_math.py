from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.data.problem import Problem
from rl.rewards.extraction import PARSERS, boxed, without_reasoning
from rl.rewards.math import verify_answer
from rl.rewards.registry import load_reward

SAMPLE = Path(__file__).parent / "data" / "gsm8k_sample.jsonl"
DAPO_PROMPT_TAIL = (
    "The last line of your response should be of the form Answer: $Answer (without quotes) where $Answer is"
    " the answer to the problem.\n\nWhat is 17 + 17?\n\nRemember to put your answer on its own line after"
    ' "Answer:".'
)


def right(parser: str, response: str, answer: str) -> bool:
    return verify_answer(response, Problem("p", "q", answer, "test"), parser=parser).correct


@pytest.mark.parametrize(
    "response, found",
    [
        (r"so \boxed{34}.", "34"),
        (r"first \boxed{1}, no: \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{x^{2^{3}}} is it", "x^{2^{3}}"),
        (r"\boxed{1} and finally \boxed{2", None),  # cut off in its final answer
        (r"\boxed{}", None),
        ("Answer: 34", None),
        ("", None),
        (r"\boxed{1}" + "x" * 10_000, None),
    ],
)
def test_boxed(response, found):
    assert PARSERS["boxed"](response) == found


@settings(deadline=None)
@given(st.recursive(st.text("ab1+ ", max_size=4), lambda inner: inner.map(lambda t: "{" + t + "}x")))
def test_boxed_finds_balanced_content(content):
    assert boxed(rf"so \boxed{{{content}}} or {{so}}") == (content.strip() or None)


@pytest.mark.parametrize(
    "response, found",
    [
        ("Answer: 34", "34"),
        ("steps\nANSWER : 34\n", "34"),
        ("Answer: 1\nNo, wrong.\nAnswer: 2", "2"),
        ("Answer:\n34", "34"),
        ("**Answer:** 34", "34"),
        ("**Answer**: **34**", "34"),
        (r"Answer: \boxed{34}", "34"),
        (r"Answer: $\boxed{34}$.", "34"),
        (r"Answer: \boxed{34", None),
        (r"so \boxed{34}", None),
        ("34", None),
        ("Answer:", None),
        ("Answer: 34\n" + "y" * 300, None),
    ],
)
def test_answer_line(response, found):
    assert PARSERS["answer_line"](response) == found


@pytest.mark.parametrize(
    "response, found",
    [
        ("Answer: 34", "34"),
        (r"so \boxed{34}", "34"),
        (r"\boxed{1}" + "\nAnswer: 34", "34"),
        (r"Answer: 34, that is \boxed{35}", "35"),
        (r"Answer: \boxed{34", None),  # cut off
        (r"\boxed{34}" + "y" * 300, None),
        ("34", None),
    ],
)
def test_answer_line_or_boxed(response, found):
    assert PARSERS["answer_line_or_boxed"](response) == found


@pytest.mark.parametrize(
    "response, answer",
    [
        ("<think>Answer: 1</think>\nAnswer: 2", "Answer: 2"),
        ("Answer: 1</think>Answer: 2", "Answer: 2"),
        ("<think>a</think>b<think>c</think>d", "d"),
        ("<think>Answer: 1", ""),
        ("Answer: 2", "Answer: 2"),
        ("", ""),
    ],
)
def test_without_reasoning(response, answer):
    assert without_reasoning(response) == answer


@pytest.mark.parametrize(
    "response, found",
    [
        ("the answer is 1,234.", "1234"),
        ("first 7, then \uff13", "7"),
        ("1,234,567.50 dollars", "1234567.50"),
        ("of 1,2,3 the last", "3"),
        ("x = -3", "-3"),
        ("x = \u22123", "-3"),
        ("(-4)", "-4"),
        ("10-3", "3"),
        ("10 - 3", "3"),
        ("it costs $5", "5"),
        ("a loss of -$3.50.", "-3.50"),
        ("about .5", ".5"),
        ("7", "7"),
        ("none", None),
    ],
)
def test_last_number(response, found):
    assert PARSERS["last_number"](response) == found


@pytest.mark.parametrize(
    "response, found",
    [
        ("work\n#### 70,000", "70000"),
        ("#### $5.\n", "5"),
        ("####-3", "-3"),
        ("#### 1\n#### 2", "2"),
        ("72", None),
        ("####", None),
        ("#### many", None),
        ("#### 1,234.", "1234"),
        ("#### 12 apples", "12"),
        ("**#### 12**", "12"),
        ("#### 3/4", None),  # neither 3 nor 4
        ("#### 12:30", None),
        ("#### 5/day", "5"),
        ("####\n12", None),  # on the line, or not at all
    ],
)
def test_gsm8k(response, found):
    assert PARSERS["gsm8k"](response) == found


@pytest.mark.parametrize(
    "line, correct",
    [
        ("34", True),
        ("34.", True),
        ("34.0", True),
        ("$34$", True),
        ("$34$.", True),
        ("= 34", True),
        ("x = 34", True),
        (r"$17 \cdot 2 = 34$", True),
        (r"\(34\)", True),
        (r"\boxed{34}", True),
        (r"\text{34}", True),
        (r"34 \text{ cm}", True),
        (r"\frac{68}{2}", True),
        ("34<|im_end|>", True),
        ("34</s>", True),
        ("34<|endoftext|>\n", True),
        ("**34**", True),
        ("\uff13\uff14", True),
        ("034", True),
        ("34 (approximately)", False),
        ("35", False),
        ("34 or 35", False),
        ("3 4", False),
        ("-34", False),
        ("", False),
        ("thirty-four", False),
        ("34" * 151, False),
    ],
)
def test_answer_lines_against_34(line, correct):
    assert right("answer_line", f"Steps.\nAnswer: {line}", "34") is correct


@pytest.mark.parametrize(
    "answer, gold",
    [
        ("1,234", "1234"),
        ("1234", "1,234"),
        (r"10{,}080", "10080"),
        (r"10,\!080", "10080"),
        ("0.5", r"\frac{1}{2}"),
        ("1/2", r"\dfrac12"),
        ("025", "25"),
        ("-366", "-366"),
        ("18.5", "18.50"),
        (r"x + 2 = y", "y = x + 2"),
        (r"(3, \frac{\pi}{2})", r"\left( 3, \frac{\pi}{2} \right)"),
        (r"\$18.90", "18.90"),
        (r"336^\circ", "336"),
    ],
)
def test_equal_values_written_differently(answer, gold):
    assert right("boxed", rf"\boxed{{{answer}}}", gold)


@pytest.mark.parametrize(
    "answer, gold", [("1,234", "1235"), ("0.5", "0.51"), ("y = x + 3", "y = x + 2"), ("x", "y")]
)
def test_other_values(answer, gold):
    assert not right("boxed", rf"\boxed{{{answer}}}", gold)


def test_an_echo_of_the_prompt_is_no_answer():
    assert not right("answer_line", DAPO_PROMPT_TAIL, "34")
    assert not right("answer_line", "Answer: $Answer", "34")
    assert right("answer_line", DAPO_PROMPT_TAIL + "\n17 + 17 = 34\nAnswer: 34", "34")


@pytest.mark.parametrize("parser", PARSERS)
def test_a_response_cut_off_before_its_answer_has_none(parser):
    assert not right(parser, "Let x be the number. Then x is", "34")


def test_a_percentage_is_the_number_that_it_shows():
    assert right("answer_line", r"Answer: 34\%", "34")


def test_gsm8k_solutions_hold_their_own_answers():
    rows = [json.loads(line) for line in SAMPLE.read_text().splitlines()]
    assert sum("," in row["answer"] for row in rows) >= 4
    for row in rows:
        assert right("gsm8k", row["solution"], row["answer"])
        assert right("last_number", row["solution"], row["answer"])
        assert not right("gsm8k", row["solution"] + "1", row["answer"])


def test_a_degenerate_answer_is_cut_short_and_wrong():
    score = verify_answer(r"\boxed{" + "9,0," * 5_000 + "9}", Problem("p", "q", "9", "test"), parser="boxed")
    assert (score.correct, score.error) == (False, None)


def test_a_problem_without_a_readable_answer_is_an_error_and_not_a_wrong_answer():
    score = load_reward("math", "boxed")(r"\boxed{1}", Problem("p", "q", "$ $", "test"))
    assert score.error is not None
    assert "cannot be parsed" in score.error
