"""Mathematical answers, compared by math-verify.

Nothing here bounds the time of a comparison: `rl.rewards.pool.RewardPool` does, by killing the process.
math-verify's own limits rest on SIGALRM, fail outside the main thread and turn a timeout into a wrong answer:
they are off.
"""

from __future__ import annotations

import logging
import re
import unicodedata
from functools import lru_cache
from typing import Any

import math_verify

from rl.data.problem import Problem
from rl.rewards.extraction import PARSERS
from rl.rewards.score import Score

MAX_ANSWER_CHARS = 300  # the longest answer of MATH-500 has 53; a degenerate one can occupy SymPy for minutes

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its limits are off


def verify_answer(response: str, problem: Problem, *, parser: str) -> Score:
    """1 when the final answer, found by the parser of that name, equals the problem's answer, else 0.

    A response without a final answer, or with one longer than MAX_ANSWER_CHARS, is wrong. Raises what
    math-verify raises, and ValueError for a problem whose own answer cannot be parsed.
    """
    found = PARSERS[parser](response)
    if found is None or len(found) > max(MAX_ANSWER_CHARS, len(problem.answer)):
        return Score.of(False)
    answer, gold = _bare(found), _bare(problem.answer)
    return Score.of(answer == gold or _equal(answer, gold))


def _equal(answer: str, gold: str) -> bool:
    parsed_gold = _parse(gold)
    if not parsed_gold:
        raise ValueError(f"the problem's answer {gold!r} cannot be parsed")
    sides = [answer] if "=" in gold else [answer, answer.rpartition("=")[2]]
    return any(
        math_verify.verify(parsed_gold, _parse(side), timeout_seconds=None, raise_on_error=True)
        for side in dict.fromkeys(sides)
        if side
    )


def _bare(text: str) -> str:
    """`text` in one line, in ASCII digits, without dollar signs, LaTeX's math delimiters and a full stop at its end."""
    text = "".join(str(unicodedata.decimal(sign)) if sign.isdecimal() else sign for sign in text)
    return re.sub(r"\\?\$|(?<!\\)\\[()\[\]]|\s+", " ", text).strip().removesuffix(".").strip()


@lru_cache(maxsize=1024)
def _parse(text: str) -> list[Any]:
    # Without the dollar signs only 392 of the 500 answers of MATH-500 equal themselves.
    return math_verify.parse(f"${text}$", parsing_timeout=None, raise_on_error=True)
