"""Finding the final answer in a response. Which rule is applied changes the score, so each has a name.

Every parser takes the response and returns the answer's text, or None when there is none. Only the end of a
response is read, which bounds the work.
"""

from __future__ import annotations

import re
from collections.abc import Callable

TAIL_CHARS = 10_000
ANSWER_LINE_TAIL_CHARS = 300

_NUMBER = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
# A minus sign (ASCII or Unicode) between two operands belongs to the operation: 10-3 holds 10 and 3.
_LAST_NUMBER = re.compile(rf"(?:(?<![\w)\]}}.])[-\u2212]\$?)?{_NUMBER}")
_GSM8K = re.compile(rf"####\s*([-\u2212]?\$?[-\u2212]?{_NUMBER})")
_ANSWER_LINE = re.compile(r"answer[*\s]*:[*\s]*([^\n]*)", re.IGNORECASE)


def boxed(response: str) -> str | None:
    r"""Content of the last ``\boxed{...}``; None when there is none or the last one is not closed."""
    tail = response[-TAIL_CHARS:]
    start = tail.rfind(r"\boxed{")
    return None if start < 0 else _braced(tail[start + len(r"\boxed") :])


def answer_line(response: str) -> str | None:
    r"""What follows the last ``Answer:`` (in any case) in the last 300 characters, to the end of the line.

    The rule of the DAPO-Math-17k prompt. A box around the answer is opened; a boxed answer elsewhere is none.
    """
    matches = _ANSWER_LINE.findall(response[-ANSWER_LINE_TAIL_CHARS:])
    if not matches:
        return None
    return boxed(matches[-1]) if r"\boxed{" in matches[-1] else matches[-1].strip("* \t") or None


def last_number(response: str) -> str | None:
    """The last number in decimal digits, without thousands commas and dollar sign."""
    matches = _LAST_NUMBER.findall(response[-TAIL_CHARS:])
    return _plain(matches[-1]) if matches else None


def gsm8k(response: str) -> str | None:
    """The number after the last ``####``, without thousands commas and dollar sign."""
    matches = _GSM8K.findall(response[-TAIL_CHARS:])
    return _plain(matches[-1]) if matches else None


def _plain(number: str) -> str:
    return number.replace(",", "").replace("$", "").replace("\u2212", "-")


def _braced(text: str) -> str | None:
    """Content of the group that `text` opens with; None when it is not closed."""
    depth = 0
    for position, character in enumerate(text):
        escaped = position > 0 and text[position - 1] == "\\"
        depth += (character == "{" and not escaped) - (character == "}" and not escaped)
        if depth == 0:
            return text[1:position].strip() or None
    return None


PARSERS: dict[str, Callable[[str], str | None]] = {
    "boxed": boxed,
    "answer_line": answer_line,
    "last_number": last_number,
    "gsm8k": gsm8k,
}
